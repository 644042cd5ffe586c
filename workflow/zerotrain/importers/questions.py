"""`zerotrain launch init`: the questions of `accelerate config` that apply here."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.config.scalar import scalar
from zerotrain.errors import PipelineError
from zerotrain.importers.files import cached_config
from zerotrain.importers.imported_config import nest
from zerotrain.importers.options import Answers
from zerotrain.importers.reading import ImportOptions, import_file
from zerotrain.importers.zero import BY_STAGE, DEVICES, PRESETS
from zerotrain.launch.preset import read_preset

NOT_ASKED = (
    "not asked, as nothing here depends on it: SageMaker, several machines, CPU only, FSDP, "
    "Megatron-LM, TPU, mixture of experts, 16-bit saving (export_weights does it); torch dynamo is "
    "launch.dynamo_backend"
)
PRECISIONS = ("no", "fp16", "bf16")


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
    known = _known(defaults, interactive, presets)
    launch, train = known.get("launch", {}), known.get("train", {})
    talk = _Talk(interactive)
    talk.say(NOT_ASKED)
    world = talk.number(
        given.num_processes, "How many GPUs should train?", launch.get("num_processes", 1)
    )
    stage = talk.choice(
        given.zero_stage, "Which ZeRO stage (none: without DeepSpeed)?", ("none", "1", "2", "3"),
        _stage(launch),
    )  # fmt: skip
    number = 0 if stage == "none" else int(stage)
    devices = _devices(given, launch, talk, number)
    path = None
    if "nvme" in devices.values():
        path = talk.text(given.offload_path, "Folder on the fast disk?", launch.get("offload_path"))
    init = None
    if number == 3:
        yes = "yes" if launch.get("zero3_init", True) else "no"
        asked = None if given.zero3_init is None else ("yes" if given.zero3_init else "no")
        init = talk.choice(asked, "Build the model sharded (zero.Init)?", ("yes", "no"), yes)
    steps = talk.number(
        given.gradient_accumulation_steps, "How many gradient accumulation steps?",
        train.get("gradient_accumulation_steps", 1),
    )  # fmt: skip
    clipping = talk.rate(
        given.gradient_clipping, "Clip gradients at which norm (0: not)?",
        train.get("max_grad_norm", 1.0),
    )  # fmt: skip
    micro = talk.number(given.micro_batch_size, "How many samples a GPU and forward pass?", 1)
    precision = talk.choice(
        given.mixed_precision, "Mixed precision?", PRECISIONS, launch.get("mixed_precision")
    )
    until = talk.text(given.until, "Until when (1000, 3 epochs, 5000 samples)?", "1000")
    preset = _preset(number, devices, presets)
    values: dict[str, Any] = {"preset": preset.name, "num_processes": world}
    values["mixed_precision"] = precision
    for target, device in devices.items():
        if device != getattr(preset, target):
            values[target] = device
    if path is not None:
        values["offload_path"] = path
    if init is not None:
        values["zero3_init"] = init == "yes"
    phase = {
        "name": given.name or preset.name.replace("_", "-"),
        "until": int(until) if until.isdigit() else until,
        "launch": values,
        "global_batch_size": micro * steps * world,
        "gradient_accumulation_steps": steps,
        "max_grad_norm": clipping,
    }
    return Phase(phase, _text(phase, micro, steps, world))


def choose(question: str, choices: Sequence[str], default: str | None) -> str:
    """Ask until the answer is one of the choices."""
    while True:
        answer = _ask(f"{question} ({', '.join(choices)})", default)
        if not answer:
            raise PipelineError(f"{question} no answer", hint="give it as a flag")
        answer = answer.strip().casefold() or default or ""
        if answer in choices:
            return answer


def _ask(question: str, default: str | None) -> str:
    """Print a question with the offered answer, and read the typed line."""
    offered = f" [{default}]" if default else ""
    print(f"{question}{offered} ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


class _Talk:
    """Questions on the terminal; without one the offered answers are used."""

    def __init__(self, interactive: bool) -> None:
        self.interactive = interactive

    def say(self, text: str) -> None:
        if self.interactive:
            print(text, file=sys.stderr)

    def choice(
        self, given: str | None, question: str, choices: Sequence[str], default: str | None
    ) -> str:
        if given is not None:
            if given.casefold() not in choices:
                raise PipelineError(
                    f"{question} {given!r} is no answer", hint=f"one of {', '.join(choices)}"
                )
            return given.casefold()
        if self.interactive:
            return choose(question, choices, default)
        if default is None:
            raise PipelineError(
                f"{question} no value is given, and there is no terminal to ask on",
                hint=f"give it as a flag: one of {', '.join(choices)}",
            )
        return default

    def text(self, given: str | None, question: str, default: str | None) -> str:
        if given is None and self.interactive:
            given = _ask(question, default).strip() or None
        if given is None and default is None:
            raise PipelineError(f"{question} no value is given", hint="give it as a flag")
        return str(default if given is None else given)

    def number(self, given: int | None, question: str, default: int) -> int:
        answer = self.text(None if given is None else str(given), question, str(default))
        if not answer.isdigit() or int(answer) < 1:
            raise PipelineError(f"{question} {answer!r}", hint="give a whole number from 1 on")
        return int(answer)

    def rate(self, given: float | None, question: str, default: float) -> float:
        answer = self.text(None if given is None else str(given), question, str(default))
        try:
            number = float(answer)
        except ValueError:
            number = math.nan
        if not number >= 0:
            raise PipelineError(f"{question} {answer!r}", hint="give a number from 0 on")
        return number


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
        print(f"{path} cannot be used; its answers are not offered", file=sys.stderr)
        return {}
    print(f"found {path}; its answers are {'offered' if interactive else 'taken'}", file=sys.stderr)
    return nest(found.values)


def _stage(launch: dict[str, Any]) -> str:
    preset = launch.get("preset", "torch")
    stage = next(stage for stage, names in BY_STAGE.items() if preset in names)
    return str(stage or "none")


def _devices(given: Answers, launch: dict[str, Any], talk: _Talk, stage: int) -> dict[str, str]:
    """Ask for the offload devices of optimizer and parameters that the stage allows."""
    preset = launch.get("preset", "torch")
    offered = {
        "offload_optimizer": {"zero2_offload": "cpu", "zero3_offload": "cpu", "zero3_nvme": "nvme"},
        "offload_param": {"zero3_offload": "cpu", "zero3_nvme": "nvme"},
    }
    found = {"offload_optimizer": "none", "offload_param": "none"}
    questions = {
        "offload_optimizer": (1, given.offload_optimizer, "Where should the optimizer live?"),
        "offload_param": (3, given.offload_param, "Where should parameters wait?"),
    }
    for target, (least, asked, question) in questions.items():
        choices = DEVICES if stage == 3 else DEVICES[:2]
        default = launch.get(target, offered[target].get(preset, "none"))
        if stage >= least:
            found[target] = talk.choice(
                asked, question, choices, default if default in choices else "none"
            )
        elif asked not in (None, "none"):
            raise PipelineError(
                f"{target} {asked} at ZeRO stage {stage or 'none'}",
                hint=f"it needs stage {least} at least",
            )
    return found


def _preset(stage: int, devices: dict[str, str], presets: Path) -> Any:
    candidates = [read_preset(presets / f"{name}.yaml") for name in BY_STAGE[stage]]
    return min(candidates, key=lambda p: sum(getattr(p, t) != d for t, d in devices.items()))


def _text(phase: dict[str, Any], micro: int, steps: int, world: int) -> str:
    launch = phase["launch"]
    shown = {key: scalar(value) for key, value in phase.items() if key != "launch"}
    lines = ["# Written by `zerotrain launch init`: an item of `phases:`."]
    lines += [f"- name: {shown['name']}", f"  until: {shown['until']}", "  launch:"]
    lines += [f"    {key}: {scalar(value)}" for key, value in launch.items()]
    product = f"{micro} a process x {steps} accumulated x {world} processes"
    lines += [f"  global_batch_size: {shown['global_batch_size']} # {product}"]
    lines += [f"  {k}: {shown[k]}" for k in ("gradient_accumulation_steps", "max_grad_norm")]
    return "\n".join(lines) + "\n"
