"""Trackers: where the curves of a training go beside metrics.jsonl.

TensorBoard's files are written by the training itself, and flushed with each checkpoint. Every
other tracker is one of accelerate's classes in a thread of its own: neither a slow network nor a
broken one is the training's business.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from accelerate import tracking

from zerotrain.launch.resolved import ResolvedPhase, explained
from zerotrain.tracker_names import TENSORBOARD, chosen

MOST_WAITING = 10_000
"""Points that wait for a slow tracker; later ones are left out."""
SECONDS_TO_FINISH = 30.0
"""A tracker may take so long at the end to send what waits."""
DEFAULT_PROJECT = "zerotrain"
Opened: TypeAlias = tuple[Any, str | None]
"""One of accelerate's trackers, and what identifies its run; None before it has chosen that."""

# accelerate's own logger asks for a state of accelerate's, which DeepSpeed's engine opens none of.
tracking.logger = logging.getLogger(tracking.__name__)


class Tracker(Protocol):
    """One tracker of one training."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Note values at a step."""

    def flush(self) -> None:
        """Before a checkpoint: what was noted must outlive the process."""

    def close(self) -> None:
        """Finish; nothing is noted any more."""


def open_trackers(
    phase: ResolvedPhase, progress: Path, step: int, say: Callable[[str], None]
) -> list[Tracker]:
    """The trackers of `report_to`, which go on from `step` where they have seen this phase.

    Args:
        phase: The resolved phase; its values are the hyperparameters of a run that begins.
        progress: The phase's progress; a tracker's run is remembered there.
        step: Steps made so far. What TensorBoard knows of later ones is void.
        say: Tells the user that a tracker has failed.
    """
    return [
        TensorBoard(phase, progress, step)
        if name == TENSORBOARD
        else Remote(name, phase, progress, say)
        for name in chosen(phase.report_to)
    ]


class TensorBoard:
    """Files for TensorBoard. What a killed process wrote beyond its checkpoint is purged."""

    def __init__(self, phase: ResolvedPhase, progress: Path, step: int) -> None:
        # It takes a while to import, and not every training wants it.
        from torch.utils.tensorboard import SummaryWriter

        folder = progress / TENSORBOARD
        begins = not folder.is_dir()
        self._board = SummaryWriter(str(folder), purge_step=step + 1)
        if begins:
            rows = "".join(f"| {name} | {value} |\n" for name, value in hyperparameters(phase))
            self._board.add_text("hyperparameters", f"| key | value |\n|---|---|\n{rows}", step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        self._board.flush()

    def close(self) -> None:
        self._board.close()


class Remote:
    """One of accelerate's trackers in a thread.

    Its run and the last step that it was given are in progress/tracker-<name>.json. A training that
    goes on from a checkpoint makes some steps again, to the same bits: they are not sent twice.
    """

    def __init__(
        self, name: str, phase: ResolvedPhase, progress: Path, say: Callable[[str], None]
    ) -> None:
        self._name, self._phase, self._progress, self._say = name, phase, progress, say
        self._kept = progress / f"tracker-{name}.json"
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self._said: set[str] = set()
        self._open = True
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        if not self._open:
            return
        try:
            self._waiting.put_nowait((step, dict(values)))
        except queue.Full:
            self._once("is too slow: points are left out")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(SECONDS_TO_FINISH)
        if self._thread.is_alive():
            self._once(f"has not finished within {SECONDS_TO_FINISH:.0f} s and is left behind")

    def _work(self) -> None:
        try:
            run, tracker, last = self._start()
        except Exception as error:
            self._open = False
            self._once(f"could not be started: {_brief(error)}")
            return
        while (item := self._waiting.get()) is not None:
            step, values = item
            if step <= last:
                continue
            try:
                tracker.log(values, step=step)
                self._keep(run, step)
            except Exception as error:
                self._once(f"has failed at step {step}: {_brief(error)}")
        try:
            tracker.finish()
        except Exception as error:
            self._once(f"could not be finished: {_brief(error)}")

    def _start(self) -> tuple[str, Any, int]:
        """The run's name for the tracker, the tracker, and the last step that it knows."""
        kept: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(self._kept.read_text())
        tracker, run = _OPEN[self._name](self._phase, self._progress, kept.get("run"))
        tracker.main_process_only = False  # it is opened on the first process alone
        tracker.start()
        if not kept:
            tracker.store_init_configuration(dict(hyperparameters(self._phase)))
        run = run or _RUN[self._name](tracker.tracker)
        last = int(kept.get("step", -1))
        self._keep(run, last)
        return run, tracker, last

    def _keep(self, run: str, step: int) -> None:
        new = self._kept.with_suffix(".new")
        new.write_text(json.dumps({"run": run, "step": step}) + "\n")
        new.replace(self._kept)

    def _once(self, what: str) -> None:
        kind = what.split(":")[0].split(" at ")[0]
        if kind not in self._said:
            self._said.add(kind)
            self._say(
                f"{self._phase.phase}: tracker {self._name} {what}; training goes on, and "
                "metrics.jsonl has everything"
            )


def hyperparameters(phase: ResolvedPhase) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of the resolved phase, as every tracker takes them."""
    for name, value, *_ in explained(phase):
        plain = isinstance(value, bool | int | float | str) or value is None
        yield name, value if plain else json.dumps(value)


def _project(phase: ResolvedPhase) -> str:
    return phase.tracker_project_name or DEFAULT_PROJECT


def _title(phase: ResolvedPhase) -> str:
    return phase.tracker_run_name or f"{phase.run}-{phase.phase}"


def _wandb(phase: ResolvedPhase, progress: Path, run: str | None) -> Opened:
    run = run or secrets.token_hex(8)
    own = {"name": _title(phase), "group": phase.run, "dir": str(progress)}
    return tracking.WandBTracker(_project(phase), id=run, resume="allow", **own), run


def _mlflow(phase: ResolvedPhase, progress: Path, run: str | None) -> Opened:
    return tracking.MLflowTracker(_project(phase), run_id=run, run_name=_title(phase)), run


def _swanlab(phase: ResolvedPhase, progress: Path, run: str | None) -> Opened:
    run = run or secrets.token_hex(11)[:21]
    own = {"name": _title(phase), "group": phase.run, "log_dir": str(progress / "swanlab")}
    return tracking.SwanLabTracker(_project(phase), id=run, resume="allow", **own), run


def _comet_ml(phase: ResolvedPhase, progress: Path, run: str | None) -> Opened:
    run = run or secrets.token_hex(16)
    return tracking.CometMLTracker(_project(phase), experiment_key=run), run


def _aim(phase: ResolvedPhase, progress: Path, run: str | None) -> Opened:
    own = {"experiment": _project(phase), "run_hash": run}
    return tracking.AimTracker(_title(phase), logging_dir=str(progress), **own), run


def _clearml(phase: ResolvedPhase, progress: Path, run: str | None) -> Opened:
    own = {"project_name": _project(phase), "task_name": _title(phase)}
    goes_on = {"continue_last_task": run or False, "reuse_last_task_id": False}
    return tracking.ClearMLTracker(_title(phase), **own, **goes_on), run


def _dvclive(phase: ResolvedPhase, progress: Path, run: str | None) -> Opened:
    folder = str(progress / "dvclive")
    goes_on = run is not None
    return tracking.DVCLiveTracker(dir=folder, resume=goes_on, save_dvc_exp=False), folder


def _trackio(phase: ResolvedPhase, progress: Path, run: str | None) -> Opened:
    run = run or f"{_title(phase)}-{secrets.token_hex(3)}"
    own = {"name": run, "group": phase.run, "resume": "allow"}
    return tracking.TrackioTracker(_project(phase), **own), run


_OPEN: dict[str, Callable[[ResolvedPhase, Path, str | None], Opened]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "comet_ml": _comet_ml,
    "aim": _aim,
    "clearml": _clearml,
    "dvclive": _dvclive,
    "trackio": _trackio,
}
_RUN: dict[str, Callable[[Any], str]] = {
    "mlflow": lambda run: str(run.info.run_id),
    "aim": lambda run: str(run.hash),
    "clearml": lambda task: str(task.id),
}
"""What identifies a run, where the tracker chooses it."""


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__
