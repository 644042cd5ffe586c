"""The stages of a run with their states: done, running, queued, waiting, failed, stopped.

A stage is done if its folder is published and the stages of the training before it are done. A
training runs if its lock has a live owner, another stage if its process is here or if Slurm runs
its job. Snakemake removes outputs and log of a job before it starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.layout import RESULTS, DataFolder, RunFolder
from zerotrain.machine.regular_file import open_to_read
from zerotrain.run.phase import (
    ASK_SECONDS,
    FAILED,
    METRICS,
    RUNNING,
    STOPPED,
    TRAINED,
    WAITING,
    PhaseView,
)
from zerotrain.run.plan import RunPlan, stamp_of
from zerotrain.run.processes import SubmittedJob, find_processes, jobs_here

ERROR_LINES = 6
"""Lines of the log that are shown."""
MOST_BYTES = 4 * 2**20
"""End of a log that is looked through."""


def last_error(logs: Sequence[str], sizes: Mapping[str, int], *, at_end: bool = False) -> list[str]:
    """Return a failed stage's error message, from the last `ERROR` line of its logs.

    Args:
        logs: Log files; the first with such a line is used.
        sizes: Size of each file in bytes before the stage started: logs are appended to.
        at_end: Whether only the end of a log counts, so that nothing succeeded after the error.
    """
    for log in logs:
        before = sizes.get(log, 0)
        try:
            with open_to_read(Path(log)) as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(before if before <= size else 0, size - MOST_BYTES))
                lines = stream.read(MOST_BYTES).decode(errors="replace").splitlines()
        except OSError:
            continue
        places = [place for place, line in enumerate(lines) if line.startswith("ERROR")]
        if at_end and places and places[-1] < len(lines) - ERROR_LINES:
            continue
        if places:
            return lines[places[-1] :][:ERROR_LINES]
    return []


def log_size(path: str) -> int:
    """Return the bytes of a log; 0 if it is missing."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


DONE, QUEUED, FINISHED = "done", "queued", "finished"
TRAIN = "train_phase"
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


class _Now:
    """What works on a run at one moment, and what it has logged."""

    def __init__(self, plan: RunPlan) -> None:
        self._run, self._owners = plan.run, dict.fromkeys((plan.run, plan.data))

    @property
    def began(self) -> float | None:
        """Return when the first Snakemake that may work on it started; None without any."""
        return find_processes().start_for(self._run)

    def runs(self, place: _Place) -> bool:
        """Return whether a process of a stage is here."""
        return any(log in find_processes().logs for log in self._logs(place))

    def newest_log(self, place: _Place) -> tuple[Path, float] | None:
        """Return the newest log of a stage, with its time."""
        found = []
        for path in self._logs(place):
            try:
                found.append((path.stat().st_mtime, path))
            except OSError:
                continue
        return (max(found)[1], max(found)[0]) if found else None

    def is_old(self, log: tuple[Path, float]) -> bool:
        """Return whether a log is that of an attempt before the Snakemakes that work."""
        return (began := self.began) is not None and log[1] < began - CLOCK_SECONDS

    def _logs(self, place: _Place) -> list[Path]:
        """List where a stage may log: runs that share data log in its folder."""
        return [RESULTS / owner / "logs" / f"{place.log}.log" for owner in self._owners]


class StageReader:
    """Reads the states again and again; Slurm is asked every ASK_SECONDS."""

    def __init__(self) -> None:
        self._asked = float("-inf")
        self._jobs: list[SubmittedJob] = []
        self._errors: dict[Path, tuple[object, str]] = {}

    def read(self, plan: RunPlan, phases: Sequence[PhaseView]) -> list[Stage]:
        """List the stages of a run in the order of its graph.

        Args:
            plan: What the run consists of.
            phases: Its phases.
        """
        folder, now = RunFolder(plan.run), _Now(plan)
        stages = [self._stage(now, place) for place in _of_data(plan)]
        ready = all(one.state == DONE for one in stages)
        before, evaluated = True, True
        for phase in phases:
            launch, train, export, evaluate = _of_phase(phase)
            made = self._stage(now, launch)
            trained = self._training(now, train, phase, before=before, ready=ready)
            exported = self._stage(now, export, after=trained.state == DONE)
            before = exported.state == DONE
            shown = self._stage(now, evaluate, after=before)
            evaluated = evaluated and shown.state == DONE
            stages += [made, trained, exported, shown]
        report = _Place("report", "report", None, (folder.report,), "report")
        stages.append(self._stage(now, report, after=evaluated))
        if any(one.state != DONE for one in stages):
            stages = [self._with_job(plan, one) for one in stages]
        return stages

    def _stage(self, now: _Now, place: _Place, *, after: bool = True) -> Stage:
        """Return a stage that is no training; after: whether the stages before it are done."""
        if not after:
            return _shown(place, WAITING)
        if all(map(_is_made, place.outputs)):
            return _shown(place, DONE)
        if now.runs(place):
            return _shown(place, RUNNING)
        log = now.newest_log(place)
        if log is None or now.is_old(log):
            return _shown(place, WAITING)
        error = self._error_of(log[0])
        return _shown(place, FAILED, error) if error else _shown(place, WAITING)

    def _training(
        self, now: _Now, place: _Place, phase: PhaseView, *, before: bool, ready: bool
    ) -> Stage:
        """Return a training; ready: whether its data are; before: whether its state to start is."""
        state = phase.state
        if state == RUNNING and (owner := phase.trainer):
            return _shown(place, RUNNING, f"pid {owner.pid} on {owner.host}", owner.job)
        if state == TRAINED and before:
            return _shown(place, DONE)
        if state in (STOPPED, FAILED):
            return _shown(place, state, phase.error)
        if before and ready and now.runs(place):
            return _shown(place, RUNNING, "starts")
        log = now.newest_log(place)
        if log and now.began is None and before and (error := self._error_of(log[0])):
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


def _of_phase(phase: PhaseView) -> tuple[_Place, ...]:
    folder, metrics = phase.places, phase.folder / METRICS
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
