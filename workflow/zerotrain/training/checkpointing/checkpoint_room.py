"""Disk space for checkpoints: forecast before the start, freed before each save, and watched."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from zerotrain.artifact.leftovers import remove
from zerotrain.config import optimizers
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.disk import size, try_writing
from zerotrain.machine.disk_errors import FULL, HINTS, DiskError
from zerotrain.models.sizes import ModelSizes
from zerotrain.training.checkpointing.preflight import state_slots
from zerotrain.training.checkpointing.progress_folder import (
    freed_bytes,
    list_removable,
    newest_step,
    saved_steps,
    step_folder,
)

FP32 = 4
SECONDS_BETWEEN_LOOKS = 10.0


def checkpoint_bytes(
    shapes: Mapping[str, Sequence[int]], slots: Iterable[str], optimizer: str
) -> int:
    """Return the bytes of a checkpoint of these parameters with these slots, `master` included."""
    own = (
        optimizers.slot_shape(optimizer, slot, list(shape))
        for slot in slots
        for shape in shapes.values()
    )
    return FP32 * sum(math.prod(shape) for shape in own if shape is not None)


def forecast(phase: ResolvedPhase, sizes: ModelSizes) -> int:
    """Return the bytes of a phase's checkpoint, from the number of its trained parameters.

    Each counts as an element of a large matrix, as nearly all of them are.
    """
    matrix = [1024, 1024]
    share = checkpoint_bytes({"": matrix}, state_slots(phase), phase.train.optimizer) / math.prod(
        matrix
    )
    return math.ceil(share * sizes.trained)


def check_writable(progress: Path) -> None:
    """Create the folder, and refuse one that cannot be written to.

    Raises:
        PipelineError: it cannot be written to; the message says why.
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
    """Refuse to start on a disk so full that training would stop after its first step.

    Raises:
        PipelineError: less is free than disk_low_threshold.
    """
    free = shutil.disk_usage(progress).free
    if phase.train.disk_low_threshold and free < phase.train.disk_low_threshold:
        raise PipelineError(
            f"{progress}: {size(free)} free, less than disk_low_threshold "
            f"{size(phase.train.disk_low_threshold)}: training would stop after its first step",
            hint=f"free some, or lower disk_low_threshold; the same command continues "
            f"{_continuation_point(progress, phase.derived.until_step)}",
        )


def check_room(progress: Path, phase: ResolvedPhase, sizes: ModelSizes) -> list[str]:
    """Compare what a phase will save with the space on the disk, before the start.

    What make_room may remove counts as free.

    Returns:
        Messages on what will not fit: the checkpoints to be kept, the export at the end.

    Raises:
        PipelineError: the disk cannot hold a new checkpoint next to the one before it.
    """
    each = forecast(phase, sizes)
    free = shutil.disk_usage(progress).free
    first = newest_step(progress, phase.derived.until_step) or phase.derived.start_step
    there = [step for step in saved_steps(progress) if step <= first]
    may_go = list_removable(progress, first + 1, phase.train.keep_every)
    room = free + sum(freed_bytes(step_folder(progress, step)) for step in may_go)
    to_come = _count_saves(phase, first)
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
    most = max_new_checkpoints(phase, first, there)
    messages = []
    if free < each * most:
        messages.append(
            f"{figures}; all that are to be kept need {size(each * most)}: the oldest will be "
            "removed before their time; lower keep or keep_every, or free some before it is full"
        )
    # The published checkpoint shares the newest one's files; weights and state are new.
    weights = FP32 * (sizes.trained if phase.lora else sizes.everything)
    if is_same_disk(progress, progress.parent):
        kept = min(most, max_checkpoints(phase, first) - 1, free // each)
        left = free - each * kept
    else:
        left = shutil.disk_usage(progress.parent).free
    if left < each + weights:
        messages.append(
            f"phase {phase.phase}: its export takes up to {size(each + weights)} (the state "
            f"{size(each)}, the weights {size(weights)} in float32), and its checkpoints leave "
            f"{size(left)}: export_weights would stop at a full disk after step "
            f"{phase.derived.until_step}; free {size(each + weights - left)} until then, or "
            "lower keep. The training is not lost by it"
        )
    return messages


def is_same_disk(a: Path, b: Path) -> bool:
    """Return whether two folders are on one file system."""
    return a.stat().st_dev == b.stat().st_dev


def max_new_checkpoints(phase: ResolvedPhase, first: int, there: Iterable[int]) -> int:
    """Return how many checkpoints the disk has to hold at once in addition to those `there`."""
    # Those kept permanently make no room for others.
    kept = phase.train.keep_every
    passing = sum(not (kept and step % kept == 0) for step in there)
    return min(_count_saves(phase, first), max_checkpoints(phase, first) - passing)


def max_checkpoints(phase: ResolvedPhase, first: int) -> int:
    """Return how many may exist at once, in addition to those kept permanently up to step `first`.

    The newest `keep`, those that `keep_every` keeps, the best by validation, and the one that is
    being written, since the oldest stays until it is whole.
    """
    return (
        phase.train.keep
        + _count_permanent(phase, first)
        + (phase.derived.validation is not None)
        + 1
    )


def make_room(progress: Path, step: int, needed: int, keep_every: int | None = None) -> list[str]:
    """Remove the oldest checkpoints before a save, if the new one would not fit; keep the newest.

    None is removed if that would not be enough.

    Returns:
        A message for each that was removed.

    Raises:
        PipelineError: it does not fit; nothing of it has been written.
    """
    messages: list[str] = []
    may_go = list_removable(progress, step, keep_every)
    free = shutil.disk_usage(progress).free
    if free + sum(freed_bytes(step_folder(progress, one)) for one in may_go) < needed:
        may_go = []
    while free < needed and may_go:
        oldest = may_go.pop(0)
        if remove(step_folder(progress, oldest)):
            messages.append(
                f"{progress}: the disk has no room for one more checkpoint; that of step {oldest} "
                "is removed before its time"
            )
        free = shutil.disk_usage(progress).free
    if free < needed:
        raise PipelineError(
            "; ".join(
                [
                    *messages,
                    f"{progress}: {size(free)} free, and the checkpoint of step {step} takes "
                    f"{size(needed)}: training stops before half of it is written",
                ]
            ),
            hint=f"free some; the same command continues {_continuation_point(progress, step)}",
        )
    return messages


def write_error(progress: Path, step: int, error: OSError | DiskError) -> PipelineError:
    """Return the error for a checkpoint that the system could not write."""
    continues = f"the same command continues {_continuation_point(progress, step)}"
    if error.errno in FULL:
        return PipelineError(
            f"{progress}: the disk is full: the checkpoint of step {step} was not written",
            hint=f"free some, or lower keep; {continues}",
        )
    what = os.strerror(error.errno) if error.errno else str(error)
    return PipelineError(
        f"{progress}: the checkpoint of step {step} cannot be written: {what}",
        hint=f"{HINTS.get(error.errno or 0, 'look at the disk')}; {continues}",
    )


class DiskWatch:
    """A check whether a folder's disk has less free than a threshold, which is reported once."""

    def __init__(self, progress: Path, threshold: int, say: Callable[[str], None]) -> None:
        self._progress = progress
        self._threshold = threshold
        self._say = say
        self._next = 0.0
        self._low = False

    def __call__(self) -> bool:
        """Return whether the disk is low; look every ten seconds, since a network disk is slow."""
        if self._low or time.monotonic() < self._next:
            return self._low
        self._next = time.monotonic() + SECONDS_BETWEEN_LOOKS
        free = shutil.disk_usage(self._progress).free
        if free < self._threshold:
            self._low = True
            self._say(
                f"{self._progress}: {size(free)} free, less than disk_low_threshold "
                f"{size(self._threshold)}: training stops after this step with a checkpoint; free "
                "some, and the same command continues"
            )
        return self._low


def _count_saves(phase: ResolvedPhase, first: int) -> int:
    """Return how many checkpoints may still be written; with `save_every` in minutes, any step.

    Any validated step may be the best so far, which is saved, too.
    """
    each = phase.train.save_every if isinstance(phase.train.save_every, int) else 1
    best = phase.derived.validation["eval_steps"] if phase.derived.validation else None
    intervals = [one for one in (each, phase.train.keep_every, best) if one]
    until = phase.derived.until_step
    steps = (range(first - first % one + one, until, one) for one in intervals)
    return len({*chain.from_iterable(steps), until})


def _count_permanent(phase: ResolvedPhase, first: int) -> int:
    each = phase.train.keep_every
    return phase.derived.until_step // each - first // each if each else 0


def _continuation_point(progress: Path, step: int) -> str:
    newest = newest_step(progress, step)
    return f"from step {newest}" if newest else "from the phase's start"
