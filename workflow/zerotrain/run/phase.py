"""One phase of a run as far as it has come.

A value is read when it is asked for; it stays until `RunView.look`, and is read again then if its
files have changed. What is damaged raises a PipelineError where it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import NonNegativeInt
from typing_extensions import TypedDict

from zerotrain import artifact
from zerotrain.artifact import RECORDS, Artifact
from zerotrain.artifact.documents import read_record
from zerotrain.artifact.layout import LOG, PhaseFolder
from zerotrain.errors import EXIT_UNFINISHED, PipelineError
from zerotrain.evaluation.results import is_learned, read_metrics
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.processes import ProcessRecord
from zerotrain.run.curves import ENGINE, GrowingLog
from zerotrain.run.plan import PlannedPhase, stamp_of
from zerotrain.state.position import read_position
from zerotrain.state.ran_on import RanOn
from zerotrain.training.checkpointing.progress_folder import (
    POSITION,
    saved_steps,
    step_folder,
)
from zerotrain.training.process import lock
from zerotrain.training.process.ending import ExitRecord, read_exit_record
from zerotrain.training.reporting import heartbeat

RUNNING, WAITING, TRAINED = "running", "waiting", "trained"
FAILED, STOPPED = "failed", "stopped"
METRICS = "metrics.json"
ASK_SECONDS = 15.0
"""Interval at which Slurm is asked: all users share its controller."""
T = TypeVar("T")


class _ReadFrom(Generic[T]):
    """A property that is read from files of a phase."""

    def __init__(self, read: Callable[[PhaseView], T], files: tuple[str, ...]) -> None:
        self._read, self._files, self.__doc__ = read, files, read.__doc__

    def __get__(self, phase: PhaseView, owner: type | None = None) -> T:
        name = self._read.__name__
        moment, stamp, value = phase.kept.get(name, (-1, None, None))
        if moment != phase.moment:
            now = [stamp_of(phase.folder / file) for file in self._files]
            value = value if now and now == stamp else self._read(phase)
            phase.kept[name] = phase.moment, now, value
        return value  # type: ignore[no-any-return]


def read_from(*files: str) -> Callable[[Callable[[PhaseView], T]], _ReadFrom[T]]:
    """Make a method a property that is read again once a file has changed; of none at each look."""
    return lambda read: _ReadFrom(read, files)


class Position(TypedDict):
    """What is read of a checkpoint's position."""

    step: NonNegativeInt


class PhaseView:
    """One phase of a run."""

    def __init__(self, folder: Path, planned: PlannedPhase | None = None) -> None:
        """Set up a reader.

        Args:
            folder: The folder of its results.
            planned: What its configuration says.
        """
        self.folder, self.planned = folder, planned
        self.places = PhaseFolder(folder)
        self.moment = 0
        self.kept: dict[str, tuple[int, object, Any]] = {}
        self._growing = GrowingLog()
        self._asked: tuple[ProcessRecord | None, float, bool] = None, 0.0, False

    @property
    def name(self) -> str:
        """Return the phase's name."""
        return self.folder.name

    @property
    def has_started(self) -> bool:
        """Return whether anything of it was trained: a phase that only has a launch was not."""
        places = self.places
        made = (places.checkpoint, places.state, places.weights, places.evaluation)
        return places.progress.is_dir() or any(map(artifact.is_published, made))

    @read_from()
    def owner(self) -> ProcessRecord | None:
        """Return the process that holds or held the lock of its training."""
        return lock.read_owner(self.places.progress)

    @read_from()
    def trainer(self) -> ProcessRecord | None:
        """Return the process that trains it now; on another machine it is looked for less often."""
        owner = self.owner
        if owner is None:
            return None
        known, asked, alive = self._asked
        now = time.monotonic()
        if known != owner or owner.is_running_here() is not None or now - asked >= ASK_SECONDS:
            alive = lock.is_alive(self.places.progress, owner)
            self._asked = owner, now, alive
        return owner if alive else None

    @read_from("progress/exit.json")
    def ended(self) -> ExitRecord | None:
        """Return how its last training ended; a killed process writes nothing."""
        return read_exit_record(self.places.progress)

    @read_from("checkpoint/manifest.json")
    def checkpoint(self) -> Artifact | None:
        """Return its published checkpoint."""
        return _published(self.places.checkpoint, "checkpoint")

    @read_from("checkpoint/manifest.json", f"checkpoint/{POSITION}")
    def end(self) -> int | None:
        """Return the `until` that its published checkpoint satisfies; its step may be earlier."""
        if (found := self.checkpoint) is None:
            return None
        if (until := found.content.get("until")) is not None:
            return int(until)
        path = found.folder / POSITION
        return int(read_record(path, Position)["step"]) if path.is_file() else None

    @property
    def until(self) -> int | None:
        """Return the step of its end; None if it is counted in epochs and not rendered yet."""
        if self.planned is not None:
            return self.planned.until
        return self.launch.derived.until_step if self.launch else None

    @read_from()
    def state(self) -> str:
        """Return whether its training is running, trained, stopped, failed or waiting.

        A damaged checkpoint counts as one of the planned end: whoever reads it says so.
        """
        if self.trainer:
            return RUNNING
        if artifact.is_published(self.places.checkpoint):
            try:
                end = self.end
            except (PipelineError, OSError):
                end = None
            if None in (self.until, end) or self.until == end:
                return TRAINED
        if self.ended is not None and self.ended.code == EXIT_UNFINISHED:
            return STOPPED
        return FAILED if self.owner or (self.ended and self.ended.code) else WAITING

    @property
    def error(self) -> str:
        """Return why it has stopped or failed; empty if it has not, or trains again."""
        if self.state not in (STOPPED, FAILED):
            return ""
        if self.ended is not None and self.ended.code:
            return self.ended.reason
        owner = self.owner
        return f"killed: {lock.describe(self.places.progress, owner)}, has ended" if owner else ""

    @read_from()
    def steps(self) -> list[int]:
        """List the steps of its rolling checkpoints."""
        return saved_steps(self.places.progress)

    @property
    def newest_rolling(self) -> Path | None:
        """Return its newest rolling checkpoint."""
        steps = self.steps
        return step_folder(self.places.progress, steps[-1]) if steps else None

    @property
    def ranks(self) -> list[heartbeat.RankStatus]:
        """List what the processes of its training report while it trains."""
        return heartbeat.read_statuses(self.places.progress) if self.trainer else []

    @property
    def start(self) -> int | None:
        """Return the step before its first one; None if it is not rendered."""
        try:
            return self.launch.derived.start_step if self.launch else None
        except (PipelineError, OSError):
            return None

    @property
    def step(self) -> int:
        """Return the last finished step that is known, of the run."""
        logged = int(self.newest.get("step", self.start or 0))
        return max([logged, *(one.step - 1 for one in self.ranks if one.step)])

    @read_from()
    def log(self) -> Path | None:
        """Return its log: a published one if it is trained, else that of its progress."""
        made = (self.places.state, self.places.checkpoint)
        published = [folder / RECORDS / LOG for folder in made if artifact.is_published(folder)]
        rolling = self.places.progress / LOG
        logs = [*published, rolling] if self.state == TRAINED else [rolling, *published]
        return next((path for path in logs if path.is_file()), None)

    @read_from()
    def growing(self) -> GrowingLog:
        """Return its log as far as it has come, of which only what is new is read."""
        self._growing.read(self.log or self.places.progress / LOG)
        return self._growing

    @property
    def newest(self) -> Mapping[str, Any]:
        """Return its newest line of a step; empty if it has none."""
        newest = self.growing.newest
        return newest if newest.get("phase") == self.name else {}

    @property
    def memory(self) -> dict[str, int | None]:
        """Return the bytes of host and device in its newest line of a step."""
        found = {kind: self.newest.get(f"{kind}_bytes") for kind in ("host", "device")}
        return {k: int(v) if isinstance(v, int | float) else None for k, v in found.items()}

    @read_from("launch/manifest.json", "launch/run.yaml")
    def launch(self) -> ResolvedPhase | None:
        """Return its resolved values; None if it was launched by hand.

        The files of a published launch are compared with their hashes.
        """
        if artifact.is_published(self.places.launch):
            artifact.read(self.places.launch, "launch")
        path = self.places.launch / "run.yaml"
        return read_run_yaml(path) if path.is_file() else None

    @read_from("state/manifest.json", "launch/run.yaml")
    def engine(self) -> dict[str, Any]:
        """Return what it was trained with by the keys of ENGINE: as recorded, else as rendered."""
        engine = self.exported.made_by.get("engine") if self.exported else None
        if isinstance(engine, dict):
            return {key: engine[name] for key, name in ENGINE.items() if name in engine}
        values = {name: value for name, value, _, _ in self.launch.explain()} if self.launch else {}
        return {key: values[key] for key in ENGINE if key in values}

    @read_from("checkpoint/manifest.json")
    def ran_on(self) -> RanOn | None:
        """Return what its last steps ran on; None without a checkpoint that has a position."""
        if self.checkpoint is None or POSITION not in self.checkpoint.files:
            return None
        return RanOn.of(read_position(self.checkpoint, POSITION))

    @read_from("state/manifest.json")
    def exported(self) -> Artifact | None:
        """Return the state with which the next phase starts."""
        return _published(self.places.state, "state")

    @read_from("weights/manifest.json")
    def weights(self) -> Artifact | None:
        """Return its exported weights."""
        return _published(self.places.weights, "weights")

    @property
    def is_exported(self) -> bool:
        """Return whether its weights and its state are published."""
        return all(map(artifact.is_published, (self.places.weights, self.places.state)))

    @property
    def averaged(self) -> bool:
        """Return whether its weights are the averaged ones (EMA)."""
        return self.weights is not None and bool(self.weights.content.get("ema"))

    @read_from("evaluation/manifest.json")
    def evaluation(self) -> Artifact | None:
        """Return its evaluation, whose files are compared with their hashes."""
        return _published(self.places.evaluation, "evaluation", verify=True)

    @read_from("evaluation/manifest.json", METRICS)
    def metrics(self) -> dict[str, Any]:
        """Return what its evaluation measured, by the names of metrics.json; empty before it."""
        if not artifact.is_published(self.places.evaluation):
            return {}
        if not (path := self.folder / METRICS).is_file():
            raise PipelineError(
                f"{path}: missing, so phase {self.name} has not been evaluated",
                hint="run `snakemake --cores all report`, which evaluates every phase first",
            )
        return {**read_metrics(path)}

    @property
    def costs(self) -> dict[str, Any]:
        """Return the metrics that say what it took: seconds and bytes."""
        return {name: value for name, value in self.metrics.items() if not is_learned(name)}

    @property
    def pictures(self) -> list[Path]:
        """List the pictures of its samples: while it trained, by step, and of its evaluation."""
        sampled = sorted(self.places.progress.glob("samples/step-*.png"))
        grid = self.places.evaluation / "grid.png"
        return [*sampled, grid] if grid.is_file() else sampled


def _published(folder: Path, kind: str, *, verify: bool = False) -> Artifact | None:
    return artifact.read(folder, kind, verify=verify) if artifact.is_published(folder) else None
