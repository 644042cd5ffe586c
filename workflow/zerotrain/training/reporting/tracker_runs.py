"""A phase's run in each tracker: opened through accelerate's classes, and found again."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from accelerate import tracking

from zerotrain.launch.resolved import ResolvedPhase

DEFAULT_PROJECT = "zerotrain"
OpenedRun: TypeAlias = tuple[Any, str | None]
"""One of accelerate's trackers and its run id; None if the tracker has not chosen the id yet."""


class PlainLogger(logging.LoggerAdapter[logging.Logger]):
    """Replacement for accelerate's logger, which needs accelerate's state; DeepSpeed's engine
    creates none."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: set[str] = set()

    def warning_once(self, message: str) -> None:
        """Log a warning, only the first time."""
        if message not in self._warned:
            self._warned.add(message)
            self.warning(message)


tracking.logger = PlainLogger(logging.getLogger(tracking.__name__))


def hyperparameters(phase: ResolvedPhase) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of the resolved phase in a form that every tracker accepts."""
    for name, value, *_ in phase.explain():
        plain = isinstance(value, bool | int | float | str) or value is None
        yield name, value if plain else json.dumps(value)


def _project(phase: ResolvedPhase) -> str:
    return phase.train.tracker_project_name or DEFAULT_PROJECT


def _title(phase: ResolvedPhase) -> str:
    return phase.train.tracker_run_name or f"{phase.run}-{phase.phase}"


def _wandb(phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    run = run or secrets.token_hex(8)
    own = {"name": _title(phase), "group": phase.run, "dir": str(progress)}
    return tracking.WandBTracker(_project(phase), id=run, resume="allow", **own), run


def _mlflow(phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    return tracking.MLflowTracker(_project(phase), run_id=run, run_name=_title(phase)), run


def _swanlab(phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    run = run or secrets.token_hex(11)[:21]
    own = {
        "experiment_name": _title(phase),
        "group": phase.run,
        "logdir": str(progress / "swanlab"),
    }
    return tracking.SwanLabTracker(_project(phase), id=run, resume="allow", **own), run


def _comet_ml(phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    run = run or secrets.token_hex(16)
    return tracking.CometMLTracker(_project(phase), experiment_key=run), run


def _aim(phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    own = {"experiment": _project(phase), "run_hash": run}
    return tracking.AimTracker(_title(phase), logging_dir=str(progress), **own), run


def _clearml(phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    own = {"project_name": _project(phase), "task_name": _title(phase)}
    resumes = {"continue_last_task": run or False, "reuse_last_task_id": False}
    return tracking.ClearMLTracker(_title(phase), **own, **resumes), run


def _dvclive(phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    folder = str(progress / "dvclive")
    resumes = run is not None
    return tracking.DVCLiveTracker(dir=folder, resume=resumes, save_dvc_exp=False), folder


def _trackio(phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    run = run or f"{_title(phase)}-{secrets.token_hex(3)}"
    own = {"name": run, "group": phase.run, "resume": "allow"}
    return tracking.TrackioTracker(_project(phase), **own), run


OPEN: dict[str, Callable[[ResolvedPhase, Path, str | None], OpenedRun]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "comet_ml": _comet_ml,
    "aim": _aim,
    "clearml": _clearml,
    "dvclive": _dvclive,
    "trackio": _trackio,
}
RUN: dict[str, Callable[[Any], str]] = {
    "mlflow": lambda run: str(run.info.run_id),
    "aim": lambda run: str(run.hash),
    "clearml": lambda task: str(task.id),
}
"""Functions that return the run id of a tracker that chooses it."""
