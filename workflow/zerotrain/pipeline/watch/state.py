"""The state of a run, from its files alone: stages, position, loss, pace, memory.

`read_run_state` reads it once; a RunReader reads it again and again, and each time only what is
new. Nothing is written, and nothing but Slurm's queue is asked. All values convert to JSON
(`RunState.as_json`); names and messages are foreign text, which whoever shows them escapes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import PhaseFolder, RunFolder
from zerotrain.errors import MOST_LETTERS, PipelineError, shorten
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.pipeline.watch.metrics import LOG, MetricsTail
from zerotrain.pipeline.watch.plan import PlanReader, RunPlan, find_file, rendered_phase
from zerotrain.pipeline.watch.runs import SnakemakeReader
from zerotrain.pipeline.watch.stages import (
    DONE,
    FAILED,
    FINISHED,
    QUEUED,
    RUNNING,
    STOPPED,
    TRAIN,
    WAITING,
    Stage,
    StageReader,
)
from zerotrain.training.reporting import heartbeat

STILL_SECONDS = 30.0
"""Time without a move from which it is said who does not move."""
SAMPLES = "samples/step-*.png"
GRID = "evaluation/grid.png"
ANSWERS = "evaluation/answers.jsonl"


@dataclass(frozen=True)
class Training:
    """Position and figures of the phase that trains now or trained last."""

    phase: str
    preset: str
    step: int
    """The last finished step that is known, of the run."""
    start_step: int | None
    until_step: int | None
    loss: float | None
    val_loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    epoch: float | None
    steps_per_second: float | None
    samples_per_second: float | None
    seconds: float | None
    """Training time of the phase so far."""
    seconds_left: float | None
    """To the end of the phase; None unless it trains."""
    time_split: dict[str, float]
    """Share of each part of the newest steps, the largest first."""
    host_bytes: int | None
    device_bytes: int | None
    still: str
    """Which processes do not move, if none has moved for STILL_SECONDS; else empty."""


@dataclass(frozen=True)
class RunState:
    """All that is known of a run at one moment."""

    run: str
    state: str
    """running, queued, failed, stopped, waiting (nothing was made yet) or finished."""
    config: str | None
    """The configuration file."""
    problem: str
    """Why the configuration could not be read; empty if it could."""
    stages: tuple[Stage, ...]
    """In the order of the graph."""
    training: Training | None
    """None: no phase has trained yet."""
    loss: tuple[tuple[int, float], ...]
    """Mean loss by step, over all phases so far; a long log is thinned out."""
    val_loss: tuple[tuple[int, float], ...]
    phase_starts: tuple[tuple[int, str], ...]
    """The step after which each phase begins, with its name; of the first its first logged one."""
    sample: str | None
    """The newest picture or file of samples."""
    time: float
    """When this was read, seconds since the epoch."""

    def as_json(self) -> dict[str, Any]:
        """Return the values as JSON has them."""
        return asdict(self)

    @property
    def is_over(self) -> bool:
        """Return whether nothing will change until somebody starts it."""
        return self.state in (FINISHED, FAILED, STOPPED)


class RunReader:
    """Reads the state of one run again and again."""

    def __init__(self, run: str, file: Path | None = None) -> None:
        """Set up a reader.

        Args:
            run: The run's name.
            file: Its configuration; default: the first of config/ that has the run.
        """
        self._run, self._folder = run, RunFolder(run)
        self._plans = PlanReader(run, file or find_file(run))
        self._stages = StageReader()
        self._snakemakes = SnakemakeReader()
        self._tail = MetricsTail()
        self._rendered: tuple[object, ResolvedPhase | None] = None, None

    def read(self) -> RunState:
        """Return the present state; a missing or half-written file leaves its values out.

        A run may be from somebody else: one that cannot be read has failed, with the reason as its
        problem, so that it never keeps the other runs from being shown.
        """
        try:
            return self._read()
        except Exception as error:
            return RunState(
                run=self._run, state=FAILED, config=None, problem=describe_fault(error), stages=(),
                training=None, loss=(), val_loss=(), phase_starts=(), sample=None, time=time.time(),
            )  # fmt: skip

    def _read(self) -> RunState:
        plan = self._plans.read()
        snakemakes = [one for one in self._snakemakes.read() if one.may_plan(self._run)]
        stages = self._stages.read(plan, snakemakes)
        name = self._trained_phase(plan, stages)
        training = self._training(name, plan, stages) if name else None
        return RunState(
            run=self._run,
            state=self._run_state(stages, works=bool(snakemakes)),
            config=str(plan.file) if plan.file else None,
            problem=plan.problem,
            stages=tuple(stages),
            training=training,
            loss=tuple(self._tail.loss.points) if name else (),
            val_loss=tuple(self._tail.val_loss.points) if name else (),
            phase_starts=tuple(self._tail.phase_starts) if name else (),
            sample=self._newest_sample(plan),
            time=time.time(),
        )

    def _run_state(self, stages: list[Stage], *, works: bool) -> str:
        states = {one.state for one in stages}
        if RUNNING in states:
            return RUNNING
        if QUEUED in states:
            return QUEUED
        if states == {DONE}:
            return FINISHED
        if works or any(one.may_plan(self._run) for one in self._snakemakes.read_starting()):
            return RUNNING  # Snakemake is between two stages, or plans
        if FAILED in states:
            return FAILED
        return STOPPED if states - {WAITING} else WAITING

    def _trained_phase(self, plan: RunPlan, stages: list[Stage]) -> str | None:
        """Return the phase that trains; else the last one of which something is logged."""
        logged = [one.name for one in plan.phases if self._log_of(one.name).is_file()]
        trains = [one.phase for one in stages if one.rule == TRAIN and one.state == RUNNING]
        return next((name for name in trains if name in logged), logged[-1] if logged else None)

    def _log_of(self, phase: str) -> Path:
        """Return the log of a phase; of one whose progress is gone, that of its checkpoint."""
        folder = self._folder.phase(phase)
        kept = folder.checkpoint / "records" / LOG
        return (
            kept
            if kept.is_file() and not (folder.progress / LOG).is_file()
            else (folder.progress / LOG)
        )

    def _training(self, name: str, plan: RunPlan, stages: list[Stage]) -> Training:
        tail, folder = self._tail, self._folder.phase(name)
        tail.read(self._log_of(name))
        newest = tail.newest if tail.newest.get("phase") == name else {}
        planned = next(one for one in plan.phases if one.name == name)
        rendered = self._rendered_phase(name)
        trains = any(
            one.rule == TRAIN and one.phase == name and one.state == RUNNING for one in stages
        )
        step = int(newest.get("step", rendered.derived.start_step if rendered else 0))
        statuses = heartbeat.read_statuses(folder.progress) if trains else []
        step = max([step, *(one.step - 1 for one in statuses if one.step)])
        until = planned.until
        pace = tail.steps_per_second()
        left = (until - step) / pace if trains and until is not None and pace else None
        return Training(
            phase=name,
            preset=planned.preset,
            step=step,
            start_step=rendered.derived.start_step if rendered else None,
            until_step=until,
            loss=_number(newest, "loss"),
            val_loss=tail.val_loss.points[-1][1] if tail.val_loss.points else None,
            learning_rate=_number(newest, "learning_rate"),
            grad_norm=_number(newest, "grad_norm"),
            epoch=_number(newest, "epoch"),
            steps_per_second=pace,
            samples_per_second=_number(newest, "samples_per_second"),
            seconds=_number(newest, "seconds"),
            seconds_left=max(left, 0.0) if left is not None else None,
            time_split=tail.time_split(),
            host_bytes=_whole(newest, "host_bytes"),
            device_bytes=_whole(newest, "device_bytes"),
            still=_describe_still(statuses),
        )

    def _rendered_phase(self, name: str) -> ResolvedPhase | None:
        """Read run.yaml again if it has changed."""
        path = self._folder.phase(name).launch / "run.yaml"
        try:
            stamp: object = (path, path.stat().st_mtime_ns)
        except OSError:
            return None
        if self._rendered[0] != stamp:
            self._rendered = stamp, rendered_phase(self._run, name)
        return self._rendered[1]

    def _newest_sample(self, plan: RunPlan) -> str | None:
        """Return the newest grid of samples or of an evaluation; of text its answers."""
        found: list[tuple[float, str]] = []
        for phase in plan.phases:
            folder = self._folder.phase(phase.name)
            for path in _sample_files(folder):
                try:
                    found.append((path.stat().st_mtime, str(path)))
                except OSError:
                    continue
        return max(found)[1] if found else None


def read_run_state(run: str, file: Path | None = None) -> RunState:
    """Read the state of a run once.

    Args:
        run: The run's name.
        file: Its configuration; default: the first of config/ that has the run.
    """
    return RunReader(run, file).read()


def describe_fault(error: Exception) -> str:
    """Return why an entry of a list is shown without its values, as a part of a sentence."""
    what = error.what if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
    first = what.split("\n", 1)[0]
    return f"cannot be read: {shorten(first, MOST_LETTERS)}"


def _sample_files(folder: PhaseFolder) -> list[Path]:
    sampled = sorted(folder.progress.glob(SAMPLES))[-1:]
    return [*sampled, folder.path / GRID, folder.path / ANSWERS]


def _describe_still(statuses: list[heartbeat.RankStatus]) -> str:
    now = time.time()
    still = min((one.still + max(one.silent_seconds(now), 0.0) for one in statuses), default=0.0)
    if still < STILL_SECONDS:
        return ""
    return "; ".join(one.describe(now) for one in heartbeat.late_ranks(statuses, now))


def _number(values: Mapping[str, Any], key: str) -> float | None:
    found = values.get(key)
    return float(found) if isinstance(found, int | float) else None


def _whole(values: Mapping[str, Any], key: str) -> int | None:
    found = values.get(key)
    return int(found) if isinstance(found, int | float) else None
