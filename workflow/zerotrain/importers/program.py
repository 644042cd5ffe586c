"""The supported programs: their values for "auto" and for missing keys, and their arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig, Outcome
from zerotrain.importers.keys import DIFFSYNTH, SIMPLETUNER, TRAINER
from zerotrain.launch.keys import Key

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
OF_NOISE_SCHEDULE = ("prediction_type", "rescale_betas_zero_snr")


@dataclass(frozen=True)
class Program:
    """A program, with its given arguments."""

    name: str
    table: Mapping[str, Key] = field(default_factory=dict)
    """Its arguments; empty if only the file is known."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values in its code, by our keys."""
    known: bool = True
    """Whether the arguments are complete, so that all others have their defaults."""

    def value(self, ours: str) -> tuple[Any, str] | None:
        """Return its value of one of our keys, and its source; None if only its script knows."""
        if ours in self.fixed:
            return self.fixed[ours], f"in the code of {self.name}"
        if (name := self.argument(ours)) is not None:
            return self.arguments[name], f"{self.name} takes it from {name}"
        rows = (key for key in self.table.values() if key.ours == ours)
        found = next((key for key in rows if key.default is not None), None)
        return None if found is None else (found.default, f"{self.name}'s own {found.name}")

    def argument(self, ours: str) -> str | None:
        """Return the argument that was given for one of our keys."""
        rows = [key.name for key in self.table.values() if key.ours == ours]
        return next((name for name in rows if name in self.arguments), None)

    def given(self, name: str) -> Any:
        """Return an argument, or None if it was not given."""
        return self.arguments.get(name)

    def put(self, ours: str, result: ImportedConfig) -> None:
        """Set its value of one of our keys, if it has one."""
        found, name = self.value(ours), self.argument(ours)
        if name is not None and found is not None:
            result.keep(name, found[0], ours)
        else:
            self.assume(result, ours)

    def assume(self, result: ImportedConfig, *keys: str) -> None:
        """Set its defaults of our keys that no argument gives."""
        for ours in keys:
            if self.argument(ours) is None and (found := self.value(ours)) is not None:
                result.assume(ours, *found)


ACCELERATE = Program("accelerate")
RUN = Program("the run")
"""A run that refers to a file: the run sets what the file does not give."""


@dataclass(frozen=True)
class Part:
    """A factor: its value if it is known, and where that comes from."""

    value: int | None
    reason: str = ""


Choose = Callable[[], tuple[str, str]]
"""Returns the precision of this machine, and the reason for it."""
PRESETS = Path("config/launch")


@dataclass(frozen=True)
class SurroundingSettings:
    """Settings that surround a DeepSpeed file."""

    program: Program
    processes: Part = Part(None)
    precision: str | None = None
    precision_source: str = "--precision"
    precision_default: tuple[str, str] = ("no", "fp32, where nothing turns another on")
    """If the file has neither fp16 nor bf16, or both are "auto"."""
    micro_batch: int | None = None
    offload_path: str | None = None
    choose: Choose | None = None
    """Chooses the precision if none is given. None for a file that a run refers to: it is read on
    many machines, and must mean the same on all."""
    presets: Path = PRESETS
    accelerate_deepspeed: tuple[str, dict[str, Any]] | None = None
    """The launcher's DeepSpeed configuration for a trainer without one: its name, its keys."""

    def with_precision(self, precision: str | None, source: str) -> SurroundingSettings:
        """Return a copy with a precision, if none is set.

        Raises:
            PipelineError: another precision is set.
        """
        if precision is None:
            return self
        if self.precision not in (None, precision):
            raise PipelineError(
                f"{source} is {precision}, but {self.precision_source} says {self.precision}",
                hint="let both say the same",
            )
        return replace(self, precision=precision, precision_source=source)


def trainer(arguments: Mapping[str, Any] | None = None) -> Program:
    """Return the Trainer of transformers, which openMind's guide also uses."""
    return Program("HF Trainer", TRAINER, arguments or {}, known=arguments is not None)


def simpletuner(arguments: Mapping[str, Any]) -> Program:
    """Return SimpleTuner."""
    return Program("SimpleTuner", SIMPLETUNER, arguments)


def diffsynth(arguments: Mapping[str, Any]) -> Program:
    """Return DiffSynth-Studio, with batches of one sample and without gradient clipping."""
    fixed = {"train.global_batch_size": 1, "train.max_grad_norm": 0.0}
    return Program("DiffSynth-Studio", DIFFSYNTH, arguments, fixed)


def drop_keys_of_others(
    arguments: dict[str, Any], table: Mapping[str, Key], family: str, result: ImportedConfig
) -> None:
    """Remove arguments that do not apply to the family, which trainers accept anyway."""
    kind = FAMILIES[family]
    others = {f"train.{key}" for other in FAMILIES.values() for key in other.objective}
    others -= {f"train.{key}" for key in kind.objective}
    if not kind.noise_schedule:
        others |= set(OF_NOISE_SCHEDULE)
    if not kind.prompt:
        others.add("cache.max_sequence_length")
    names = [name for name in arguments if table[name].ours in others]
    result.ignore_all(arguments, names, f"{family} has no such thing")


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
        stands = result.values.get(ours, value)
        if stands != value and file_wins:
            result.ignore(name, value, f"{program.name} lets its DeepSpeed configuration win")
        elif stands != value:
            raise PipelineError(
                f"{name} is {value!r}, but the DeepSpeed file makes {ours} {stands!r}",
                hint="let both say the same",
            )
        elif ours in result.values:
            result.note("kept", name, value, "", ours)
        else:
            result.keep(name, value, ours)


def note_rest(
    result: ImportedConfig,
    program: Program,
    names: Sequence[str],
    outcome: Outcome,
    reason: str,
    ours: str = "",
) -> None:
    """Note arguments of these names that nothing has read, as part of our key."""
    noted = {note.key for note in result.notes}
    for name in (name for name in names if name in program.arguments and name not in noted):
        result.note(outcome, name, program.arguments[name], reason, ours)


def put_micro_batch(result: ImportedConfig, program: Program, *, file_wins: bool) -> None:
    """Note the micro batch that an argument gives; its product is set already."""
    name = next(k.name for k in program.table.values() if k.ours == "train.global_batch_size")
    given = program.given(name)
    if given is None or name in {note.key for note in result.notes}:
        return
    if "train.global_batch_size" not in result.values:
        return  # the cause is already among the problems
    values = result.values
    steps = values["train.gradient_accumulation_steps"] * values["launch.num_processes"]
    total = values["train.global_batch_size"]
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
        reason = f"{program.name}'s default of {epochs}"
        result.assume("phases.until", f"{default:g} epochs", reason)
    elif passes <= 0:
        raise PipelineError(f"{epochs} is {passes}", hint="give a number above 0")
    else:
        result.keep(epochs, passes, "phases.until", f"{passes:g} epochs")
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


def put_run(output: str | None, base: str, result: ImportedConfig, name: str) -> None:
    """Set the run's name: by the folder of results if one is given, else by its model."""
    if output is not None:
        result.keep(name, output, "run", name_of(output), "results lie under results/<run>")
    else:
        result.assume("run", name_of(base), "named by its model")


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
