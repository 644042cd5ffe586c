"""Trackers: where the curves of a training go beside metrics.jsonl.

TensorBoard's files are written by the training itself, and flushed with each checkpoint. Every
other tracker is one of accelerate's classes in a thread of its own: neither a slow network nor a
broken one is the training's business.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.tracker_names import TENSORBOARD, chosen
from zerotrain.training.progress_folder import LOG
from zerotrain.training.tracker_runs import OPEN, RUN, hyperparameters

LAST_STEP = "last_step.json"
"""In TensorBoard's folder: the last step of which its files have every point."""
MOST_WAITING = 10_000
"""Points that wait for a slow tracker; later ones are left out."""
SECONDS_TO_FINISH = 30.0
"""A tracker may take so long at the end to send what waits."""


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


NOT_TRACKED = ("phase", "step", "samples", "epoch", "seconds")
"""Keys of a line that say where the run is."""


def points_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Give the points of a line of metrics.jsonl by the names that trackers have for them.

    Those of a step and of an epoch are of `train/`; a validation names its own. What is not a
    finite number is left out.
    """
    known = {key: v for key, v in line.items() if key not in NOT_TRACKED and v is not None}
    if "samples" in line:
        return {f"train/{key}": value for key, value in known.items()}
    if "train_epoch_loss" in line:
        return {f"train/{key.removeprefix('train_')}": value for key, value in known.items()}
    return known


class Known:
    """The last step of which a tracker has points, and their names.

    A step has several points: those of its training, and after them those of its validation.
    """

    def __init__(self, step: int, names: Iterable[str] = ()) -> None:
        self._step, self._names = step, set(names)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Known:
        """From what `state` gave, if anything."""
        return cls(int(state.get("step", -1)), state.get("names", ()))

    def new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Those of the values that the tracker has not got."""
        if step < self._step:
            return {}
        had = self._names if step == self._step else ()
        return {name: value for name, value in values.items() if name not in had}

    def add(self, step: int, names: Iterable[str]) -> None:
        """Note points that it has got."""
        if step > self._step:
            self._step, self._names = step, set()
        self._names.update(names)

    def state(self) -> dict[str, Any]:
        """The step and the names, for a file."""
        return {"step": self._step, "names": sorted(self._names)}


class TensorBoard:
    """Files for TensorBoard. Each start makes them agree with the log that its checkpoint brought.

    What earlier starts wrote from some step on is void, and the log's lines from there are written
    again: from the last step that the files have for sure, or the start's own if that is before it.
    A checkpoint may be later than what they have: a start with a lower `until` has purged them.
    """

    def __init__(self, phase: ResolvedPhase, progress: Path, step: int) -> None:
        # It takes a while to import, and not every training wants it.
        from zerotrain.training.event_files import EventFile

        folder = progress / TENSORBOARD
        begins = not folder.is_dir()
        self._kept = folder / LAST_STEP
        # A folder of an earlier version says nothing, and has all.
        had = phase.start_step if begins else int(_read(self._kept).get("step", step))
        first = min(had, step)
        self._last = step
        self._board = EventFile(folder, purge_step=first)
        if begins or first <= phase.start_step:
            rows = "".join(f"| {name} | {value} |\n" for name, value in hyperparameters(phase))
            at = phase.start_step
            self._board.add_text("hyperparameters", f"| key | value |\n|---|---|\n{rows}", at)
        for line in _lines(progress / LOG, phase.phase, first):
            self._board.add_scalars(points_of(line), line["step"])
        self.flush()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._board.add_scalars(values, step)
        self._last = step

    def flush(self) -> None:
        self._board.flush()
        with contextlib.suppress(OSError):  # then the next start writes more lines again
            _write(self._kept, {"step": self._last})

    def close(self) -> None:
        self.flush()
        self._board.close()


class Remote:
    """One of accelerate's trackers in a thread.

    Its run, the last step that it was given and the names of that step's points are in
    progress/tracker-<name>.json. A training that goes on from a checkpoint makes some steps again,
    to the same bits: their points are not sent twice.
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

    def _start(self) -> tuple[str, Any, Known]:
        """The run's name for the tracker, the tracker, and what it has of the run so far."""
        kept = _read(self._kept)
        tracker, run = OPEN[self._name](self._phase, self._progress, kept.get("run"))
        tracker.main_process_only = False  # it is opened on the first process alone
        tracker.start()
        if not kept:
            tracker.store_init_configuration(dict(hyperparameters(self._phase)))
        run = run or RUN[self._name](tracker.tracker)
        known = Known.read(kept)
        self._keep(run, known)
        return run, tracker, known

    def _keep(self, run: str, known: Known) -> None:
        _write(self._kept, {"run": run, **known.state()})

    def _once(self, what: str) -> None:
        kind = what.split(":")[0].split(" at ")[0]
        if kind not in self._said:
            self._said.add(kind)
            self._say(
                f"{self._phase.phase}: tracker {self._name} {what}; training goes on, and "
                "metrics.jsonl has everything"
            )


def _lines(log: Path, phase: str, first: int) -> list[dict[str, Any]]:
    """Read a phase's lines of a log from a step on."""
    with contextlib.suppress(FileNotFoundError):
        lines = map(json.loads, log.read_text().splitlines())
        return [line for line in lines if line["phase"] == phase and line["step"] >= first]
    return []


def _read(kept: Path) -> dict[str, Any]:
    """What is remembered; nothing where that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(kept.read_text()))
    return {}


def _write(kept: Path, state: Mapping[str, Any]) -> None:
    new = kept.with_suffix(".new")
    new.write_text(json.dumps(state) + "\n")
    new.replace(kept)


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__
