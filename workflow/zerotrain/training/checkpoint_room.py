"""The disk that checkpoints need: forecast before the start, made before each save, watched."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from zerotrain import optimizers
from zerotrain.artifact.in_use import remove
from zerotrain.disk_errors import FULL, HINTS, DiskError
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.disk import size, try_writing
from zerotrain.model_sizes import ModelSizes
from zerotrain.position import EMA, MASTER
from zerotrain.training.progress_folder import (
    freed_bytes,
    newest_step,
    removable,
    saved_steps,
    step_folder,
)

FP32 = 4
SECONDS_BETWEEN_LOOKS = 10.0


def checkpoint_bytes(
    shapes: Mapping[str, Sequence[int]], slots: Iterable[str], optimizer: str
) -> int:
    """Bytes of a checkpoint of these parameters with these slots, `master` among them."""
    own = (
        optimizers.slot_shape(optimizer, slot, list(shape))
        for slot in slots
        for shape in shapes.values()
    )
    return FP32 * sum(math.prod(shape) for shape in own if shape is not None)


def forecast(phase: ResolvedPhase, sizes: ModelSizes) -> int:
    """Bytes of a checkpoint of a phase, from the number of its trained parameters.

    Each counts as an element of a large matrix, which is what nearly all of them are.
    """
    matrix = [1024, 1024]
    slots = [
        *(MASTER, *optimizers.slots(phase.optimizer, phase.optimizer_args)),
        *([EMA] if phase.use_ema else []),
    ]
    share = checkpoint_bytes({"": matrix}, slots, phase.optimizer) / math.prod(matrix)
    return math.ceil(share * sizes.trained)


def check_writable(progress: Path) -> None:
    """Make the folder, and refuse one that cannot be written.

    Raises:
        PipelineError: saying why.
    """
    try:
        progress.mkdir(parents=True, exist_ok=True)
        try_writing(progress)
    except OSError as error:
        raise PipelineError(
            f"{progress}: checkpoints cannot be written here: {error.strerror or error}",
            hint=HINTS.get(error.errno or 0, "look at the disk, and at whose folder it is"),
        ) from error


def check_low(progress: Path, phase: ResolvedPhase) -> None:
    """Refuse to start on a disk on which the training would stop after its first step.

    Raises:
        PipelineError: less is free than disk_low_threshold.
    """
    free = shutil.disk_usage(progress).free
    if phase.disk_low_threshold and free < phase.disk_low_threshold:
        raise PipelineError(
            f"{progress}: {size(free)} free, less than disk_low_threshold "
            f"{size(phase.disk_low_threshold)}: training would stop after its first step",
            hint=f"free some, or lower disk_low_threshold; the same command goes on "
            f"{_from(progress, phase.until_step)}",
        )


def check_room(progress: Path, phase: ResolvedPhase, sizes: ModelSizes) -> list[str]:
    """Compare what a phase will save with the disk, before the start.

    What make_room may remove counts as free.

    Returns:
        Sentences on what will not fit: the checkpoints that are to be kept, the export at the end.

    Raises:
        PipelineError: it does not hold one beside the one before it, or less is free than
            disk_low_threshold.
    """
    each = forecast(phase, sizes)
    free = shutil.disk_usage(progress).free
    begun = newest_step(progress, phase.until_step) or phase.start_step
    there = [step for step in saved_steps(progress) if step <= begun]
    may_go = removable(progress, begun + 1, phase.keep_every)
    room = free + sum(freed_bytes(step_folder(progress, step)) for step in may_go)
    to_come = _saves(phase, begun)
    least = each * (1 if there else min(2, to_come))
    figures = (
        f"phase {phase.phase}: a checkpoint takes {size(each)} (float32 weights and the "
        f"optimizer's tensors of {sizes.trained} trained parameters), and {progress} has "
        f"{size(free)} free"
    )
    if room < least:
        raise PipelineError(
            f"{figures}; {size(least)} are needed, since the one before stays until the new one "
            "is whole",
            hint="free some, train in a folder on a larger disk, or train an adapter (lora)",
        )
    most = most_to_come(phase, begun, there)
    said = []
    if free < each * most:
        said.append(
            f"{figures}; all that are to be kept need {size(each * most)}: the oldest will be "
            "removed before their time; lower keep or keep_every, or free some before it is full"
        )
    # The published checkpoint shares the newest one's files; weights and state are new.
    weights = FP32 * (sizes.trained if phase.lora else sizes.everything)
    if share_disk(progress, progress.parent):
        kept = min(most, most_checkpoints(phase, begun) - 1, free // each)
        left = free - each * kept
    else:
        left = shutil.disk_usage(progress.parent).free
    if left < each + weights:
        said.append(
            f"phase {phase.phase}: its export takes up to {size(each + weights)} (the state "
            f"{size(each)}, the weights {size(weights)} in float32), and its checkpoints leave "
            f"{size(left)}: export_weights would stop at a full disk after step "
            f"{phase.until_step}; free {size(each + weights - left)} until then, or lower keep. "
            "The training is not lost by it"
        )
    return said


def share_disk(a: Path, b: Path) -> bool:
    """Whether two folders are on one file system."""
    return a.stat().st_dev == b.stat().st_dev


def most_to_come(phase: ResolvedPhase, begun: int, there: Iterable[int]) -> int:
    """How many checkpoints more than those that are `there` the disk will have to hold at once."""
    # Those kept for good stay, whatever is written.
    kept = phase.keep_every
    passing = sum(not (kept and step % kept == 0) for step in there)
    return min(_saves(phase, begun), most_checkpoints(phase, begun) - passing)


def most_checkpoints(phase: ResolvedPhase, begun: int) -> int:
    """How many may lie there at once, beside those kept for good up to the step `begun`.

    The newest `keep`, those that `keep_every` keeps, the best by validation, and the one that is
    being written, since the oldest stays until it is whole.
    """
    return phase.keep + _kept_for_good(phase, begun) + (phase.validation is not None) + 1


def make_room(progress: Path, step: int, needed: int, keep_every: int | None = None) -> list[str]:
    """Before a save: remove the oldest checkpoints but one, where the new one would not fit else.

    None is removed where that would not be enough.

    Returns:
        A sentence for each that was removed.

    Raises:
        PipelineError: it does not fit; nothing of it has been written.
    """
    said: list[str] = []
    may_go = removable(progress, step, keep_every)
    free = shutil.disk_usage(progress).free
    if free + sum(freed_bytes(step_folder(progress, one)) for one in may_go) < needed:
        may_go = []
    while free < needed and may_go:
        oldest = may_go.pop(0)
        if remove(step_folder(progress, oldest)):
            said.append(
                f"{progress}: the disk has no room for one more checkpoint; that of step {oldest} "
                "is removed before its time"
            )
        free = shutil.disk_usage(progress).free
    if free < needed:
        raise PipelineError(
            "; ".join(
                [
                    *said,
                    f"{progress}: {size(free)} free, and the checkpoint of step {step} takes "
                    f"{size(needed)}: training stops before half of it is written",
                ]
            ),
            hint=f"free some; the same command goes on {_from(progress, step)}",
        )
    return said


def not_written(progress: Path, step: int, error: OSError | DiskError) -> PipelineError:
    """What the system said of a checkpoint, as a sentence."""
    goes_on = f"the same command goes on {_from(progress, step)}"
    if error.errno in FULL:
        return PipelineError(
            f"{progress}: the disk is full: the checkpoint of step {step} was not written",
            hint=f"free some, or lower keep; {goes_on}",
        )
    what = os.strerror(error.errno) if error.errno else str(error)
    return PipelineError(
        f"{progress}: the checkpoint of step {step} cannot be written: {what}",
        hint=f"{HINTS.get(error.errno or 0, 'look at the disk')}; {goes_on}",
    )


class DiskWatch:
    """True once the disk of a folder has less free than a threshold, which is said once."""

    def __init__(self, progress: Path, threshold: int, say: Callable[[str], None]) -> None:
        self._progress = progress
        self._threshold = threshold
        self._say = say
        self._next = 0.0
        self._low = False

    def __call__(self) -> bool:
        """Look every ten seconds; a network's disk takes its time to answer."""
        if self._low or time.monotonic() < self._next:
            return self._low
        self._next = time.monotonic() + SECONDS_BETWEEN_LOOKS
        free = shutil.disk_usage(self._progress).free
        if free < self._threshold:
            self._low = True
            self._say(
                f"{self._progress}: {size(free)} free, less than disk_low_threshold "
                f"{size(self._threshold)}: training stops after this step with a checkpoint; free "
                "some, and the same command goes on"
            )
        return self._low


def _saves(phase: ResolvedPhase, begun: int) -> int:
    """Checkpoints that are still to be written; with a clock in minutes there may be any number.

    Any validated step may be the best so far, which is saved, too.
    """
    each = phase.save_every if isinstance(phase.save_every, int) else 1
    best = phase.validation["eval_steps"] if phase.validation else None
    intervals = [one for one in (each, phase.keep_every, best) if one]
    until = phase.until_step
    steps = (range(begun - begun % one + one, until, one) for one in intervals)
    return len({*chain.from_iterable(steps), until})


def _kept_for_good(phase: ResolvedPhase, begun: int) -> int:
    each = phase.keep_every
    return phase.until_step // each - begun // each if each else 0


def _from(progress: Path, step: int) -> str:
    newest = newest_step(progress, step)
    return f"from step {newest}" if newest else "from the phase's start"
