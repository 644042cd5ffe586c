"""Arguments of a trainer that correspond to one of our keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.program import Program

NEWEST = ("latest",)
"""Names of the newest checkpoint."""
SKIPPED = (
    "run", "launch", "lora", "data", "base", "family", "resume_from_checkpoint", "phases",
    "phases.until", "train.resolution", "train.save_every", "train.lr_scheduler",
    "train.lr_warmup_ratio", "train.optimizer", "launch.mixed_precision", "launch.preset",
    "launch.num_processes", "launch.offload_path", "train.global_batch_size",
    "train.lr_scheduler_args", "train.optimizer_args",
)  # fmt: skip
"""Our keys that readers set separately."""


def put_arguments(result: ImportedConfig, program: Program, *, file_wins: bool) -> None:
    """Set our keys from arguments with the same meaning.

    Args:
        result: May already have values of the DeepSpeed file.
        program: The trainer with its arguments.
        file_wins: Whether the trainer gives precedence to the DeepSpeed file; otherwise it stops,
            and so does this function.

    Raises:
        PipelineError: file and argument contradict each other.
    """
    noted = {note.key for note in result.notes}
    for name, value in program.arguments.items():
        ours = program.table[name].ours
        if name in noted or ours in SKIPPED:
            continue
        if ours in result.values and result.values[ours] != value and file_wins:
            result.ignore(name, value, f"{program.name} lets its DeepSpeed configuration win")
        elif ours in result.values and result.values[ours] != value:
            raise PipelineError(
                f"{name} is {value!r}, but the DeepSpeed file makes {ours} {result.values[ours]!r}",
                hint="let both say the same",
            )
        elif ours in result.values:
            result.note("kept", name, value, "", ours)
        else:
            result.keep(name, value, ours)


def put_micro_batch(result: ImportedConfig, program: Program, *, file_wins: bool) -> None:
    """Note the micro batch that an argument gives; its product is set already."""
    name = next(k.name for k in program.table.values() if k.ours == "train.global_batch_size")
    given = program.given(name)
    if given is None or name in {note.key for note in result.notes}:
        return
    if "train.global_batch_size" not in result.values:
        return  # the cause is already among the problems
    steps = (
        result.values["train.gradient_accumulation_steps"] * result.values["launch.num_processes"]
    )
    total = result.values["train.global_batch_size"]
    if given * steps == total:
        result.note("kept", name, given, f"x {steps} = {total}", "train.global_batch_size")
    elif file_wins:
        result.ignore(name, given, f"{program.name} lets its DeepSpeed configuration win")
    else:
        raise PipelineError(
            f"{name} {given} x {steps} (accumulation x processes) is not the DeepSpeed file's "
            f"train_batch_size {total}",
            hint="let both say the same",
        )


def put_until(result: ImportedConfig, program: Program, steps: str, epochs: str) -> int | None:
    """Set the end of the phase, and return the number of steps if known."""
    given, passes = program.given(steps), program.given(epochs)
    if given is not None and given > 0:
        result.keep(steps, given, "phases.until")
        if passes is not None:
            result.ignore(epochs, passes, f"{steps} says it")
        return int(given)
    if given is not None:
        result.ignore(steps, given, f"{epochs} says it")
    if passes is None:
        default = program.table[epochs].default
        result.assume("phases.until", _epochs(default), f"{program.name}'s default of {epochs}")
    elif passes <= 0:
        raise PipelineError(f"{epochs} is {passes}", hint="give a number above 0")
    else:
        result.keep(epochs, passes, "phases.until", _epochs(passes))
    return None


def put_save_every(result: ImportedConfig, name: str, given: Any, until: int | None) -> None:
    """Set the interval of checkpoints, at most the length of the phase."""
    if not isinstance(given, int) or given < 1:
        raise PipelineError(f"{name} is {given}", hint="give steps between checkpoints, from 1 on")
    if until is not None and given > until:
        result.put(
            "changed", name, given, "train.save_every", until,
            f"beyond the last step {until}, so that nothing would be saved before the end; a "
            "checkpoint at the end is always there, and a lower number guards against a crash",
        )  # fmt: skip
    else:
        result.keep(name, given, "train.save_every")


def put_resume(given: str | None, result: ImportedConfig, newest: Sequence[str] = NEWEST) -> None:
    """Set the checkpoint that the training starts from, if `given` names one."""
    name = "resume_from_checkpoint"
    if given is not None and given.casefold() in newest:
        result.ignore(name, given, "a run resumes from its newest checkpoint by itself")
    elif given is not None:
        result.keep(name, given, name)


def name_of(text: str) -> str:
    """Return a run name of letters, digits, - and _ from the end of a path or a hub id."""
    tail = re.sub(r"[^A-Za-z0-9_-]+", "-", text.rstrip("/").rpartition("/")[2]).strip("-_")
    return tail if tail and tail != "data" else "imported"


def _epochs(number: float) -> str:
    return f"{number:g} epochs"


OTHER_PARTS = {
    "sdxl": ("unet", "text_encoder", "text_encoder_2"),
    "sd3": ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3"),
    "flux": ("transformer", "text_encoder", "text_encoder_2"),
    "qwen_image": ("transformer", "text_encoder"),
}
"""The parts with weights of each family, except its autoencoder. Family modules need torch."""


def with_autoencoder(base: str, vae: str, family: str) -> str:
    """Return the base with the autoencoder of another folder or hub repository.

    Args:
        base: The model: a folder or hub id in diffusers' layout.
        vae: The autoencoder, as for `from_pretrained` of its class.
        family: The family of both.

    Raises:
        PipelineError: the base already names its parts.
    """
    if ":" in base:
        raise PipelineError(
            f"base {base} names its parts, and {vae} is a further one", hint="name it there"
        )
    own = [f"{base}:{part}/" for part in OTHER_PARTS[family]]
    return ",".join([*own, f"{vae}:diffusion_pytorch_model.safetensors"])
