"""`zerotrain launch init`: the questions of `accelerate config` that apply here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from zerotrain.config.scalar import scalar
from zerotrain.errors import PipelineError
from zerotrain.importers.files import cached_config
from zerotrain.importers.options import Answers
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.importers.zero import BY_STAGE, DEVICES, PRESETS
from zerotrain.launch.preset import read_preset

NOT_ASKED = (
    "not asked, as nothing here depends on it: SageMaker, several machines, CPU only, FSDP, "
    "Megatron-LM, TPU, mixture of experts, 16-bit saving (export_weights does it); torch dynamo is "
    "launch.dynamo_backend"
)
Read = Callable[[str], Any]
"""Reads an answer; typer.BadParameter: it is not one."""


@dataclass(frozen=True)
class Phase:
    """The phase that results from the answers."""

    values: dict[str, Any]
    """Its values in the form of a configuration: name, until, launch and training values."""
    text: str
    """The same as YAML, as an item of `phases:`."""


def ask_launch(
    given: Answers, defaults: Path | None, *, interactive: bool, presets: Path = PRESETS
) -> Phase:
    """Ask for missing values; without a terminal use defaults, except for the precision.

    Args:
        given: Answers given in advance.
        defaults: accelerate's YAML, whose values are offered; None: the cached one, if any.
        interactive: Whether to ask on a terminal.
        presets: Folder of the preset files.

    Raises:
        PipelineError: an answer is not one of the choices, or no precision is given.
    """
    # Standard output is for the phase: questions and typed answers go to standard error.
    with contextlib.redirect_stdout(sys.stderr):
        return _ask_all(given, _known(defaults, interactive, presets), interactive, presets)


def _ask_all(given: Answers, known: dict[str, Any], interactive: bool, presets: Path) -> Phase:
    launch, train = known.get("launch", {}), known.get("train", {})
    if interactive:
        print(NOT_ASKED)

    def ask(question: str, answer: Any, default: Any, read: Read = str) -> Any:
        return _ask(question, answer, default, read, interactive)

    def choose(question: str, answer: str | None, default: str | None, *choices: str) -> str:
        def read(text: str) -> str:
            if text.casefold() not in choices:
                raise typer.BadParameter(f"one of {', '.join(choices)}")
            return text.casefold()

        return str(ask(f"{question} ({', '.join(choices)})", answer, default, read))

    world = ask(
        "How many GPUs should train?", given.num_processes, launch.get("num_processes", 1), _count
    )
    preset = launch.get("preset", "torch")
    number = next(number for number, names in BY_STAGE.items() if preset in names)
    stage = choose(
        "Which ZeRO stage (none: without DeepSpeed)?", given.zero_stage, str(number or "none"),
        "none", "1", "2", "3",
    )  # fmt: skip
    number = 0 if stage == "none" else int(stage)
    offered = {
        "offload_optimizer": {"zero2_offload": "cpu", "zero3_offload": "cpu", "zero3_nvme": "nvme"},
        "offload_param": {"zero3_offload": "cpu", "zero3_nvme": "nvme"},
    }
    devices = {"offload_optimizer": "none", "offload_param": "none"}
    for target, least, asked, question in (
        ("offload_optimizer", 1, given.offload_optimizer, "Where should the optimizer live?"),
        ("offload_param", 3, given.offload_param, "Where should parameters wait?"),
    ):
        choices = DEVICES if number == 3 else DEVICES[:2]
        default = launch.get(target, offered[target].get(preset, "none"))
        if number >= least:
            default = default if default in choices else "none"
            devices[target] = choose(question, asked, default, *choices)
        elif asked not in (None, "none"):
            raise PipelineError(
                f"{target} {asked} at ZeRO stage {number or 'none'}",
                hint=f"it needs stage {least} at least",
            )
    path = init = None
    if "nvme" in devices.values():
        path = ask("Folder on the fast disk?", given.offload_path, launch.get("offload_path"))
    if number == 3:
        answer = None if given.zero3_init is None else "yes" if given.zero3_init else "no"
        default = "yes" if launch.get("zero3_init", True) else "no"
        init = choose("Build the model sharded (zero.Init)?", answer, default, "yes", "no")
    steps = ask(
        "How many gradient accumulation steps?", given.gradient_accumulation_steps,
        train.get("gradient_accumulation_steps", 1), _count,
    )  # fmt: skip
    clipping = ask(
        "Clip gradients at which norm (0: not)?", given.gradient_clipping,
        train.get("max_grad_norm", 1.0), _norm,
    )  # fmt: skip
    micro = ask("How many samples a GPU and forward pass?", given.micro_batch_size, 1, _count)
    precision = choose(
        "Mixed precision?", given.mixed_precision, launch.get("mixed_precision"),
        "no", "fp16", "bf16",
    )  # fmt: skip
    until = ask("Until when (1000, 3 epochs, 5000 samples)?", given.until, "1000")
    candidates = [read_preset(presets / f"{name}.yaml") for name in BY_STAGE[number]]
    nearest = min(candidates, key=lambda p: sum(getattr(p, t) != d for t, d in devices.items()))
    values: dict[str, Any] = {"preset": nearest.name, "num_processes": world}
    values["mixed_precision"] = precision
    values |= {t: device for t, device in devices.items() if device != getattr(nearest, t)}
    if path is not None:
        values["offload_path"] = path
    if init is not None:
        values["zero3_init"] = init == "yes"
    phase = {
        "name": given.name or nearest.name.replace("_", "-"),
        "until": int(until) if until.isdigit() else until,
        "launch": values,
        "global_batch_size": micro * steps * world,
        "gradient_accumulation_steps": steps,
        "max_grad_norm": clipping,
    }
    return Phase(phase, _text(phase, micro, steps, world))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise typer.BadParameter("give a whole number from 1 on")
    return int(text)


def _norm(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (number := float(text)) >= 0:
            return number
    raise typer.BadParameter("give a number from 0 on")


def _ask(question: str, given: Any, default: Any, read: Read, interactive: bool) -> Any:
    """Return the given answer, else ask; without a terminal return the offered answer."""
    if given is None and interactive:
        try:
            return typer.prompt(
                question,
                None if default is None else str(default),
                value_proc=read,
                prompt_suffix=" ",
            )
        except typer.Abort as error:
            if isinstance(error.__context__, EOFError):
                raise PipelineError(f"{question} no answer", hint="give it as a flag") from error
            raise
    answer = default if given is None else given
    if answer is None:
        raise PipelineError(
            f"{question} no value is given, and there is no terminal to ask on",
            hint="give it as a flag",
        )
    try:
        return read(str(answer))
    except typer.BadParameter as error:
        raise PipelineError(f"{question} {str(answer)!r}", hint=error.message) from error


def _known(defaults: Path | None, interactive: bool, presets: Path) -> dict[str, Any]:
    """Read the answers from accelerate's file, in our form."""
    path = defaults or cached_config()
    if path is None:
        return {}
    try:
        found = import_file(path, ImportOptions(presets=presets, precision=None))
    except PipelineError:
        if defaults is not None:
            raise
        # An existing but invalid file must not keep the user from answering.
        print(f"{path} cannot be used; its answers are not offered")
        return {}
    print(f"found {path}; its answers are {'offered' if interactive else 'taken'}")
    return found.nested()


def _text(phase: dict[str, Any], micro: int, steps: int, world: int) -> str:
    shown = {key: scalar(value) for key, value in phase.items() if key != "launch"}
    lines = ["# Written by `zerotrain launch init`: an item of `phases:`."]
    lines += [f"- name: {shown['name']}", f"  until: {shown['until']}", "  launch:"]
    lines += [f"    {key}: {scalar(value)}" for key, value in phase["launch"].items()]
    product = f"{micro} a process x {steps} accumulated x {world} processes"
    lines += [f"  global_batch_size: {shown['global_batch_size']} # {product}"]
    lines += [f"  {k}: {shown[k]}" for k in ("gradient_accumulation_steps", "max_grad_norm")]
    return "\n".join(lines) + "\n"
