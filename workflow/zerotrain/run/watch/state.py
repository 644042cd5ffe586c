"""The state of a run at one moment, as values: stages, position, loss, pace, memory.

`read_state` takes it from a RunView. Nothing is written, and nothing but Slurm's queue is asked.
All values convert to JSON (`RunState.as_json`); names and messages are foreign text, which whoever
shows them escapes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerotrain.errors import MOST_LETTERS, PipelineError, shorten
from zerotrain.run.phase import FAILED, STOPPED, TRAINED, PhaseView
from zerotrain.run.stages import FINISHED, Stage
from zerotrain.run.view import RunView
from zerotrain.training.reporting import heartbeat

STILL_SECONDS = 30.0
"""Time without a move after which a process is named that does not move."""
ANSWERS = "answers.jsonl"


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
    """running, queued, failed, trained, stopped, waiting (nothing was made yet) or finished."""
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
        return self.state in (FINISHED, FAILED, TRAINED, STOPPED)


def read_state(view: RunView) -> RunState:
    """Look at a run again, and return its state; what is half written leaves its values out.

    A run may be from somebody else: one that cannot be read has failed, with the reason as its
    problem, so that it never keeps the other runs from being shown.
    """
    try:
        return _read(view)
    except Exception as error:
        return RunState(
            run=view.run, state=FAILED, config=None, problem=describe_fault(error), stages=(),
            training=None, loss=(), val_loss=(), phase_starts=(), sample=None, time=time.time(),
        )  # fmt: skip


def read_run_state(run: str) -> RunState:
    """Read the state of a run once, with the first configuration of config/ that has the run."""
    return read_state(RunView(run))


def describe_fault(error: Exception) -> str:
    """Return why an entry of a list is shown without its values, as a part of a sentence."""
    what = error.what if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
    first = what.split("\n", 1)[0]
    return f"cannot be read: {shorten(first, MOST_LETTERS)}"


def _read(view: RunView) -> RunState:
    view.look()
    plan, stages, phase = view.plan, view.stages, view.current
    log = phase.growing if phase else None
    return RunState(
        run=view.run,
        state=view.state_of(stages),
        config=str(plan.file) if plan.file else None,
        problem=plan.problem,
        stages=tuple(stages),
        training=_training(phase) if phase else None,
        loss=tuple(log.loss.points) if log else (),
        val_loss=tuple(log.val_loss.points) if log else (),
        phase_starts=tuple(log.phase_starts) if log else (),
        sample=_newest_sample(view.phases),
        time=time.time(),
    )


def _training(phase: PhaseView) -> Training:
    newest, log, step, until = phase.newest, phase.growing, phase.step, phase.until
    pace = log.steps_per_second()
    left = (until - step) / pace if phase.trainer and until is not None and pace else None
    return Training(
        phase=phase.name,
        preset=phase.planned.preset if phase.planned else "",
        step=step,
        start_step=phase.start,
        until_step=until,
        loss=_number(newest, "loss"),
        val_loss=log.val_loss.points[-1][1] if log.val_loss.points else None,
        learning_rate=_number(newest, "learning_rate"),
        grad_norm=_number(newest, "grad_norm"),
        epoch=_number(newest, "epoch"),
        steps_per_second=pace,
        samples_per_second=_number(newest, "samples_per_second"),
        seconds=_number(newest, "seconds"),
        seconds_left=max(left, 0.0) if left is not None else None,
        time_split=log.time_split(),
        host_bytes=phase.memory["host"],
        device_bytes=phase.memory["device"],
        still=_describe_still(phase.ranks),
    )


def _newest_sample(phases: Sequence[PhaseView]) -> str | None:
    """Return the newest grid of samples or of an evaluation; of text its answers."""
    found: list[tuple[float, str]] = []
    for phase in phases:
        for path in (*phase.pictures[-2:], phase.places.evaluation / ANSWERS):
            try:
                found.append((path.stat().st_mtime, str(path)))
            except OSError:
                continue
    return max(found)[1] if found else None


def _describe_still(statuses: list[heartbeat.RankStatus]) -> str:
    now = time.time()
    still = min((one.still + max(one.silent_seconds(now), 0.0) for one in statuses), default=0.0)
    if still < STILL_SECONDS:
        return ""
    return "; ".join(one.describe(now) for one in heartbeat.late_ranks(statuses, now))


def _number(values: Mapping[str, Any], key: str) -> float | None:
    found = values.get(key)
    return float(found) if isinstance(found, int | float) else None
