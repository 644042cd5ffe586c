"""Trackers: the programs that receive a training's curves in addition to metrics.jsonl.

The training itself writes TensorBoard's files, and flushes them with each checkpoint. Every other
tracker is one of accelerate's classes in a separate thread: a slow or broken network does not
affect the training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from accelerate import tracking
from pydantic import Field

from zerotrain.artifact.documents import read_json_lines, read_record
from zerotrain.artifact.layout import LOG
from zerotrain.config.trackers import TENSORBOARD, chosen_trackers
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.regular_file import make_folder, write_text

LAST_STEP = "last_step.json"
"""File in TensorBoard's folder: the last step of which its files have every point."""
MOST_WAITING = 10_000
"""Largest number of queued points for a slow tracker; later ones are dropped."""
SECONDS_TO_FINISH = 30.0
"""Time that a tracker gets at the end to send queued points."""


@dataclass(frozen=True)
class StoredTracker:
    """What a progress folder stores of a tracker."""

    run: str | None = None
    step: Annotated[int, Field(ge=-1, lt=2**62)] | None = None
    """The last step of which the tracker has points."""
    names: list[str] = field(default_factory=list)


def open_trackers(
    phase: ResolvedPhase, progress: Path, step: int, say: Callable[[str], None]
) -> list[TensorBoard | Remote]:
    """Return the trackers of `report_to`, which continue from `step` if they know this phase.

    Args:
        phase: The resolved phase; its values are the hyperparameters of a new run.
        progress: The phase's progress folder, which stores a tracker's run.
        step: Steps completed so far. TensorBoard's points of later steps are discarded.
        say: Reports a failed tracker to the user.
    """
    return [
        TensorBoard(phase, progress, step)
        if name == TENSORBOARD
        else Remote(name, phase, progress, say)
        for name in chosen_trackers(phase.train.report_to)
    ]


NOT_TRACKED = ("phase", "step", "samples", "epoch", "seconds")
"""Keys of a line that describe the position of the run."""


def points_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the points of a metrics.jsonl line by the names that trackers use.

    Points of a step and of an epoch get the prefix `train/`; those of a validation keep their
    names. Other values are dropped: None, which replaces non-finite numbers, and lists, which have
    a number for each process.
    """
    known = {
        key: value
        for key, value in line.items()
        if key not in NOT_TRACKED and isinstance(value, int | float)
    }
    if "samples" in line:
        return {f"train/{key}": value for key, value in known.items()}
    if "train_epoch_loss" in line:
        return {f"train/{key.removeprefix('train_')}": value for key, value in known.items()}
    return known


class LoggedPoints:
    """Last step of which a tracker has points, and their names.

    A step has several points: those of its training, then those of its validation.
    """

    def __init__(self, step: int, names: Iterable[str] = ()) -> None:
        self._step, self._names = step, set(names)

    @classmethod
    def read(cls, state: StoredTracker) -> LoggedPoints:
        """Restore from the result of `state`, if there is one."""
        return cls(-1 if state.step is None else state.step, state.names)

    def new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values that the tracker does not have."""
        if step < self._step:
            return {}
        had = self._names if step == self._step else ()
        return {name: value for name, value in values.items() if name not in had}

    def add(self, step: int, names: Iterable[str]) -> None:
        """Record points that the tracker has."""
        if step > self._step:
            self._step, self._names = step, set()
        self._names.update(names)

    def state(self) -> dict[str, Any]:
        """Return the step and the names, for a file."""
        return {"step": self._step, "names": sorted(self._names)}


class TensorBoard:
    """TensorBoard files, which each start makes consistent with the log of its checkpoint.

    Points of earlier starts from some step on are discarded, and the log's lines from that step are
    written again. The step is the last one that the files have for certain, or the start's own if
    that is earlier. A checkpoint may be later than the files: a start with a lower `until` has
    purged them.
    """

    def __init__(self, phase: ResolvedPhase, progress: Path, step: int) -> None:
        # Slow to import, and not every training needs it.
        from zerotrain.training.reporting.event_files import EventFile

        folder = progress / TENSORBOARD
        begins = not folder.is_dir()
        make_folder(folder)
        self._kept = folder / LAST_STEP
        # On a full disk the file may not have been written; the folder has all points then.
        had = phase.derived.start_step if begins else _read(self._kept).step
        first = step if had is None else min(had, step)
        self._last = step
        self._board = EventFile(folder, purge_step=first)
        if begins or first <= phase.derived.start_step:
            rows = "".join(f"| {name} | {value} |\n" for name, value in hyperparameters(phase))
            at = phase.derived.start_step
            self._board.add_text("hyperparameters", f"| key | value |\n|---|---|\n{rows}", at)
        for line in _lines(progress / LOG, phase.phase, first):
            self._board.add_scalars(points_of(line), line["step"])
        self.flush()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values at a step."""
        self._board.add_scalars(values, step)
        self._last = step

    def flush(self) -> None:
        """Flush before a checkpoint: recorded values must survive the process."""
        self._board.flush()
        with contextlib.suppress(OSError):  # then the next start writes more lines again
            _write(self._kept, {"step": self._last})

    def close(self) -> None:
        """Finish; no values are recorded afterwards."""
        self.flush()
        self._board.close()


class Remote:
    """One of accelerate's trackers in a thread.

    progress/tracker-<name>.json stores its run, the last step that it received and the names of
    that step's points. A training that resumes from a checkpoint repeats some steps, to the same
    bits: their points are not sent twice. The methods are those of TensorBoard.
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
            run, tracker, known = self._start()
        except Exception as error:
            self._open = False
            self._once(f"could not be started: {_brief(error)}")
            return
        while (item := self._waiting.get()) is not None:
            step, values = item
            new = known.new(step, values)
            if not new:
                continue
            try:
                tracker.log(new, step=step)
                known.add(step, new)
                self._keep(run, known)
            except Exception as error:
                self._once(f"has failed at step {step}: {_brief(error)}")
        try:
            tracker.finish()
        except Exception as error:
            self._once(f"could not be finished: {_brief(error)}")

    def _start(self) -> tuple[str, Any, LoggedPoints]:
        """Return the run's id, the tracker, and the points of the run that it has so far."""
        kept = _read(self._kept)
        tracker, run = open_run(self._name, self._phase, self._progress, kept.run)
        tracker.main_process_only = False  # only the first process opens it
        tracker.start()
        if kept.run is None:
            tracker.store_init_configuration(dict(hyperparameters(self._phase)))
        run = run or RUN[self._name](tracker.tracker)
        known = LoggedPoints.read(kept)
        self._keep(run, known)
        return run, tracker, known

    def _keep(self, run: str, known: LoggedPoints) -> None:
        _write(self._kept, {"run": run, **known.state()})

    def _once(self, what: str) -> None:
        kind = what.split(":")[0].split(" at ")[0]
        if kind not in self._said:
            self._said.add(kind)
            self._say(
                f"{self._phase.phase}: tracker {self._name} {what}; training continues, and "
                "metrics.jsonl has everything"
            )


def _lines(log: Path, phase: str, first: int) -> list[dict[str, Any]]:
    """Read a phase's lines of a log, starting at a step."""
    with contextlib.suppress(FileNotFoundError):
        return [
            line
            for line in read_json_lines(log)
            if line.get("phase") == phase
            and isinstance(step := line.get("step"), int)
            and first <= step < 2**62
        ]
    return []


def _read(kept: Path) -> StoredTracker:
    """Return the stored values; none if they cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_record(kept, StoredTracker)
    return StoredTracker()


def _write(kept: Path, state: Mapping[str, Any]) -> None:
    new = kept.with_suffix(".new")
    write_text(new, json.dumps(state) + "\n")
    new.replace(kept)


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__


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


def open_run(name: str, phase: ResolvedPhase, progress: Path, run: str | None) -> OpenedRun:
    """Open a phase's run by accelerate's class of a tracker; without `run` it is a new one."""
    project = phase.train.tracker_project_name or DEFAULT_PROJECT
    title = phase.train.tracker_run_name or f"{phase.run}-{phase.phase}"
    words: list[str] = [project]
    own: dict[str, Any]
    match name:
        case "wandb":
            run = run or secrets.token_hex(8)
            own = {"name": title, "group": phase.run, "dir": str(progress)}
            own |= {"id": run, "resume": "allow"}
        case "mlflow":
            own = {"run_id": run, "run_name": title}
        case "swanlab":
            run = run or secrets.token_hex(11)[:21]
            own = {"experiment_name": title, "group": phase.run}
            own |= {"id": run, "resume": "allow", "logdir": str(progress / "swanlab")}
        case "comet_ml":
            run = run or secrets.token_hex(16)
            own = {"experiment_key": run}
        case "aim":
            words = [title]
            own = {"experiment": project, "run_hash": run, "logging_dir": str(progress)}
        case "clearml":
            words = [title]
            own = {"project_name": project, "task_name": title}
            own |= {"continue_last_task": run or False, "reuse_last_task_id": False}
        case "dvclive":
            words, folder = [], str(progress / "dvclive")
            own = {"dir": folder, "resume": run is not None, "save_dvc_exp": False}
            run = folder
        case "trackio":
            run = run or f"{title}-{secrets.token_hex(3)}"
            own = {"name": run, "group": phase.run, "resume": "allow"}
    return tracking.LOGGER_TYPE_TO_CLASS[name](*words, **own), run


RUN: dict[str, Callable[[Any], str]] = {
    "mlflow": lambda run: str(run.info.run_id),
    "aim": lambda run: str(run.hash),
    "clearml": lambda task: str(task.id),
}
"""Functions that return the run id of a tracker that chooses it."""
