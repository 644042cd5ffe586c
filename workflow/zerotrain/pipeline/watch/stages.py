"""The stages of a run with their states: done, running, queued, waiting, failed, stopped.

A stage is done if its folder is published and the stages of the training before it are done. A
training runs if its lock has a live owner. Another stage runs if its log is newer than a Snakemake
that works on the run, or if Slurm runs its job. Snakemake removes outputs and log of a job before
it starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.layout import RESULTS, DataFolder, PhaseFolder, RunFolder
from zerotrain.errors import EXIT_UNFINISHED
from zerotrain.pipeline.cluster.slurm import SubmittedJob, jobs_here
from zerotrain.pipeline.job_files import last_error
from zerotrain.pipeline.watch.plan import PlannedPhase, RunPlan, stamp_of
from zerotrain.pipeline.watch.runs import LiveSnakemake
from zerotrain.training.process import lock
from zerotrain.training.process.ending import read_exit_record
from zerotrain.training.process.lock_owner import LockOwner

DONE, RUNNING, QUEUED, WAITING = "done", "running", "queued", "waiting"
FAILED, STOPPED, FINISHED = "failed", "stopped", "finished"
TRAIN = "train_phase"
ASK_SECONDS = 15.0
"""Interval at which Slurm is asked: all users share its controller."""
CLOCK_SECONDS = 2.0
"""By how much a file system's clock may be behind this machine's."""


@dataclass(frozen=True)
class Stage:
    """A stage of a run."""

    name: str
    """dataset, base, cache 1024, state, launch, train, export, evaluate or report."""
    rule: str
    phase: str | None
    state: str
    folder: str
    """Where its result is, or will be."""
    job: str = ""
    """Id of its Slurm job."""
    detail: str = ""
    """Who trains, why it waits in the queue, or how it ended."""


@dataclass(frozen=True)
class _Place:
    """A stage without its state."""

    name: str
    rule: str
    phase: str | None
    outputs: tuple[Path, ...]
    log: str


class StageReader:
    """Reads the states again and again; what needs Slurm is asked every ASK_SECONDS."""

    def __init__(self) -> None:
        self._asked = float("-inf")
        self._jobs: list[SubmittedJob] = []
        self._alive: dict[tuple[Path, LockOwner], tuple[float, bool]] = {}
        self._ends: dict[Path, tuple[object, int | None]] = {}
        self._errors: dict[Path, tuple[object, str]] = {}

    def read(self, plan: RunPlan, snakemakes: Sequence[LiveSnakemake]) -> list[Stage]:
        """List the stages of a run in the order of its graph.

        Args:
            plan: What the run consists of.
            snakemakes: The live ones that may work on it.
        """
        folder = RunFolder(plan.run)
        began = min((one.started for one in snakemakes), default=None)
        shared = [self._stage(plan, place, began) for place in _of_data(plan)]
        stages = list(shared)
        ready = all(one.state == DONE for one in stages)
        before, evaluated = True, True
        for phase in plan.phases:
            of_phase = folder.phase(phase.name)
            launch, train, export, evaluate = _of_phase(phase, of_phase)
            made = self._stage(plan, launch, began)
            trained = self._training(plan, phase, train, of_phase, began, before, ready)
            exported = self._stage(plan, export, began, after=trained.state == DONE)
            before = exported.state == DONE
            shown = self._stage(plan, evaluate, began, after=before)
            evaluated = evaluated and shown.state == DONE
            stages += [made, trained, exported, shown]
        report = _Place("report", "report", None, (folder.report,), "report")
        stages.append(self._stage(plan, report, began, after=evaluated))
        if any(one.state != DONE for one in stages):
            stages = [self._with_job(plan, one) for one in stages]
        return stages

    def _stage(
        self, plan: RunPlan, place: _Place, began: float | None, *, after: bool = True
    ) -> Stage:
        """Return a stage that is no training; after: whether the stages before it are done."""
        if after and all(map(_is_made, place.outputs)):
            return _shown(place, DONE)
        if not after:
            return _shown(place, WAITING)
        log = _newest_log(plan, place.log)
        if log is None:
            return _shown(place, WAITING)
        error = self._error_of(log[0])
        if began is not None and log[1] < began - CLOCK_SECONDS:
            return _shown(place, WAITING)  # the log of an earlier attempt
        if error:
            return _shown(place, FAILED, error)
        return _shown(place, RUNNING if began is not None else WAITING)

    def _training(
        self,
        plan: RunPlan,
        phase: PlannedPhase,
        place: _Place,
        folder: PhaseFolder,
        began: float | None,
        before: bool,
        ready: bool,
    ) -> Stage:
        progress = folder.progress
        owner = lock.read_owner(progress)
        if owner is not None and self._is_alive(progress, owner):
            detail = f"pid {owner.pid} on {owner.host}"
            return _shown(place, RUNNING, detail, owner.job)
        until = phase.until
        if before and artifact.is_published(folder.checkpoint):
            end = self._published_end(folder.checkpoint)
            if None in (until, end) or until == end:
                return _shown(place, DONE)
        ended = read_exit_record(progress)
        if ended is not None and ended.code == EXIT_UNFINISHED:
            return _shown(place, STOPPED, ended.reason)
        if ended is not None and ended.code:
            return _shown(place, FAILED, ended.reason)
        if owner is not None:
            return _shown(place, FAILED, f"killed: {lock.describe(progress, owner)}, has ended")
        log = _newest_log(plan, place.log)
        if before and ready and began is not None and log and log[1] >= began - CLOCK_SECONDS:
            return _shown(place, RUNNING, "starts")
        if log and began is None and before and (error := self._error_of(log[0])):
            return _shown(place, FAILED, error)
        return _shown(place, WAITING)

    def _with_job(self, plan: RunPlan, stage: Stage) -> Stage:
        """Add the Slurm job of a stage that is not done."""
        if stage.state == DONE or stage.job:
            return stage
        now = time.monotonic()
        if now - self._asked >= ASK_SECONDS:
            self._asked, self._jobs = now, jobs_here(Path())
        for job in self._jobs:
            if job.rule != stage.rule or job.wildcards not in _wildcards(plan, stage):
                continue
            if job.waits and stage.state != RUNNING:
                return replace(stage, state=QUEUED, job=job.id, detail=job.reason)
            if not job.waits:
                return replace(stage, state=RUNNING, job=job.id)
        return stage

    def _is_alive(self, progress: Path, owner: LockOwner) -> bool:
        """Return whether a lock's owner runs; one on another machine is looked for less often."""
        if owner.is_running_here() is not None:
            return lock.is_alive(progress, owner)
        now = time.monotonic()
        asked, alive = self._alive.get((progress, owner), (float("-inf"), True))
        if now - asked >= ASK_SECONDS:
            alive = lock.is_alive(progress, owner)
            self._alive[progress, owner] = now, alive
        return alive

    def _published_end(self, checkpoint: Path) -> int | None:
        """Return the step that a published checkpoint's training ended at, read once."""
        manifest = checkpoint / artifact.MANIFEST
        stamp = stamp_of(manifest)
        if checkpoint not in self._ends or self._ends[checkpoint][0] != stamp:
            self._ends[checkpoint] = stamp, _read_end(checkpoint)
        return self._ends[checkpoint][1]

    def _error_of(self, log: Path) -> str:
        """Return the error with which a log ends, without its hint; empty if with none."""
        stamp = stamp_of(log)
        if log not in self._errors or self._errors[log][0] != stamp:
            lines = last_error([str(log)], {}, at_end=True)
            error = lines[0].removeprefix("ERROR: ") if lines else ""
            self._errors[log] = stamp, error
        return self._errors[log][1]


def _of_data(plan: RunPlan) -> Iterator[_Place]:
    folder, data = RunFolder(plan.run), DataFolder(plan.data)
    yield _Place("dataset", "prepare_dataset", None, (data.path,), "prepare_dataset")
    yield _Place("base", "build_base", None, (folder.base,), "build_base")
    for size in plan.cache_sizes:
        log = f"cache_latents.{size}"
        yield _Place(f"cache {size}", "cache_latents", None, (data.cache(size),), log)
    if plan.imports:
        yield _Place(
            "state", "import_checkpoint", None, (folder.imported_state,), "import_checkpoint"
        )


def _of_phase(phase: PlannedPhase, folder: PhaseFolder) -> tuple[_Place, ...]:
    metrics = folder.path / "metrics.json"
    outputs = {
        ("launch", "render_launch"): (folder.launch,),
        ("train", TRAIN): (folder.checkpoint,),
        ("export", "export_weights"): (folder.weights, folder.state),
        ("evaluate", "evaluate"): (folder.evaluation, metrics),
    }
    return tuple(
        _Place(name, rule, phase.name, made, f"{rule}.{phase.name}")
        for (name, rule), made in outputs.items()
    )


def _wildcards(plan: RunPlan, stage: Stage) -> tuple[str, ...]:
    """Return the values that a job's comment may have for a stage."""
    if stage.phase:
        return stage.phase, f"{plan.run}_{stage.phase}"
    size = stage.name.removeprefix("cache ") if stage.name.startswith("cache ") else ""
    shared = plan.data if stage.rule in ("prepare_dataset", "cache_latents") else plan.run
    return (size, f"{shared}_{size}") if size else ("", shared)


def _is_made(output: Path) -> bool:
    return output.is_file() if output.suffix == ".json" else artifact.is_published(output)


def _shown(place: _Place, state: str, detail: str = "", job: str = "") -> Stage:
    folder = str(place.outputs[0])
    return Stage(place.name, place.rule, place.phase, state, folder, job, detail)


def _newest_log(plan: RunPlan, name: str) -> tuple[Path, float] | None:
    """Return the newest log of a stage, with its time; runs that share data log in its folder."""
    found = []
    for owner in dict.fromkeys((plan.run, plan.data)):
        path = RESULTS / owner / "logs" / f"{name}.log"
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:
            continue
    return (max(found)[1], max(found)[0]) if found else None


def _read_end(checkpoint: Path) -> int | None:
    """Read the `until` that a checkpoint satisfies, else its step; None if it is damaged.

    artifact.read would clean up after a killed writer, and this only looks.
    """
    try:
        until = read_object(checkpoint / artifact.MANIFEST)["content"].get("until")
        if until is None:
            until = read_object(checkpoint / "checkpoint.json")["step"]
        return int(until)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
