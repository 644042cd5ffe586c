"""Arguments of a trainer that say the same as one of our keys."""

from __future__ import annotations

import re
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.draft import Draft
from zerotrain.importing.program import Program

SKIPPED = (
    "run", "launch", "lora", "data", "base", "family", "resume_from_checkpoint", "phases",
    "phases.until", "train.resolution", "train.save_every", "train.lr_scheduler",
    "train.lr_warmup_ratio", "train.optimizer", "launch.mixed_precision", "launch.preset",
    "launch.num_processes", "launch.offload_path", "train.global_batch_size",
)  # fmt: skip
"""Our keys that a reader settles itself."""


def put_arguments(draft: Draft, program: Program, *, file_wins: bool) -> None:
    """Set what stands under one of our keys as it is.

    Args:
        draft: May have a value of the DeepSpeed file already.
        program: The trainer with its arguments.
        file_wins: Whether the trainer lets the DeepSpeed file have its way; else it stops, and so
            does this.

    Raises:
        PipelineError: file and argument contradict each other.
    """
    noted = {note.key for note in draft.notes}
    for name, value in program.arguments.items():
        ours = program.table[name].ours
        if name in noted or ours in SKIPPED:
            continue
        if ours in draft.values and draft.values[ours] != value and file_wins:
            draft.ignore(name, value, f"{program.name} lets its DeepSpeed configuration win")
        elif ours in draft.values and draft.values[ours] != value:
            raise PipelineError(
                f"{name} is {value!r}, but the DeepSpeed file makes {ours} {draft.values[ours]!r}",
                hint="let both say the same",
            )
        elif ours in draft.values:
            draft.say("kept", name, value, "", ours)
        else:
            draft.keep(name, value, ours)


def put_micro_batch(draft: Draft, program: Program, *, file_wins: bool) -> None:
    """Note the micro batch that an argument gives; its product stands there already."""
    name = next(k.name for k in program.table.values() if k.ours == "train.global_batch_size")
    given = program.given(name)
    if given is None or name in {note.key for note in draft.notes}:
        return
    steps = draft.values["train.gradient_accumulation_steps"] * draft.values["launch.num_processes"]
    total = draft.values["train.global_batch_size"]
    if given * steps == total:
        draft.say("kept", name, given, f"x {steps} = {total}", "train.global_batch_size")
    elif file_wins:
        draft.ignore(name, given, f"{program.name} lets its DeepSpeed configuration win")
    else:
        raise PipelineError(
            f"{name} {given} x {steps} (accumulation x processes) is not the DeepSpeed file's "
            f"train_batch_size {total}",
            hint="let both say the same",
        )


def put_until(draft: Draft, program: Program, steps: str, epochs: str) -> int | None:
    """Set where the phase ends; the number of steps where it is known."""
    given, passes = program.given(steps), program.given(epochs)
    if given is not None and given > 0:
        draft.keep(steps, given, "phases.until")
        if passes is not None:
            draft.ignore(epochs, passes, f"{steps} says it")
        return int(given)
    if given is not None:
        draft.ignore(steps, given, f"{epochs} says it")
    if passes is None:
        default = program.table[epochs].default
        draft.default("phases.until", _epochs(default), f"{program.name}'s default of {epochs}")
    elif passes <= 0:
        raise PipelineError(f"{epochs} is {passes}", hint="give a number above 0")
    else:
        draft.keep(epochs, passes, "phases.until", _epochs(passes))
    return None


def put_save_every(draft: Draft, name: str, given: Any, until: int | None) -> None:
    """Set how often a checkpoint is written, at most once a phase."""
    if not isinstance(given, int) or given < 1:
        raise PipelineError(f"{name} is {given}", hint="give steps between checkpoints, from 1 on")
    if until is not None and given > until:
        draft.put(
            "changed", name, given, "train.save_every", until,
            f"beyond the last step {until}, so that nothing would be saved before the end; a "
            "checkpoint at the end is always there, and a lower number guards against a crash",
        )  # fmt: skip
    else:
        draft.keep(name, given, "train.save_every")


def name_of(text: str) -> str:
    """A name for a run of letters, digits, - and _: from the end of a path or a hub id."""
    tail = re.sub(r"[^A-Za-z0-9_-]+", "-", text.rstrip("/").rpartition("/")[2]).strip("-_")
    return tail if tail and tail != "data" else "imported"


def _epochs(number: float) -> str:
    return f"{number:g} epochs"
