"""The form's controls, made from the configuration's models and DeepSpeed's table of keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, WithJsonSchema

from zerotrain.config import optimizers
from zerotrain.config.data import DataConfig
from zerotrain.config.families import DEFAULT, FAMILIES
from zerotrain.config.launch import LaunchConfig
from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.config.scalar import scalar
from zerotrain.config.trained_part import LoraConfig
from zerotrain.config.training import TrainConfig
from zerotrain.launch.keys import DEEPSPEED, ZERO
from zerotrain.launch.planner.architecture import read_shipped
from zerotrain.launch.planner.gpus import GPUS

Kind = Literal["text", "number", "choice", "values"]
YES_NO = ("false", "true")
MODELS: dict[str, type[BaseModel]] = {
    "": RunConfig, "data": DataConfig, "lora": LoraConfig, "train": TrainConfig,
    "launch": LaunchConfig, "phase": Phase,
}  # fmt: skip
"""The models of the configuration's sections; `phase` is the phase that the form shows."""
LONG = (
    "base",
    "data.images",
    "data.path",
    "machine.gpu",
    "launch.offload_path",
    "train.lr_scheduler",
    "train.lr_scheduler_args",
    "train.optimizer_args",
)
DEEPSPEED_KEYS = "launch.deepspeed."
MOST = 2000
"""Characters of a text that is read as values."""


@dataclass(frozen=True)
class Control:
    """A control, and what its label and its documentation are.

    Attributes:
        name: Its name in the form: the key's place, such as train.learning_rate.
        kind: What is shown; `values` are several by their names, written as {momentum: 0.9}.
        about: The key's documentation.
        default: What holds where nothing is given, as text; empty if that varies.
        choices: Values to choose from; of a text, suggestions.
    """

    name: str
    kind: Kind
    about: str
    default: str = ""
    choices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The key as in a file, with its section where that says more."""
        if self.name.startswith(DEEPSPEED_KEYS):
            return self.name.removeprefix(f"{DEEPSPEED_KEYS}{ZERO}")
        return self.name if self.name.startswith(("lora.", "data.")) else self.key

    @property
    def long(self) -> bool:
        """Whether a value may need the whole width: a path or a name of the hub."""
        return self.name in LONG

    @property
    def key(self) -> str:
        """Its last part, by which messages name it."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Group:
    """Controls under one heading.

    Attributes:
        title: The heading.
        controls: The controls.
        folded: Whether the group is closed at first.
    """

    title: str
    controls: tuple[Control, ...]
    folded: bool = False


@cache
def groups(family: str) -> tuple[Group, ...]:
    """Return the controls of a family, in the order of the page."""
    text = family in FAMILIES and FAMILIES[family].modality == "text"
    size = "max_length" if text else "resolution"
    return (
        Group("Model and data", (
            *_of("", "run"), _family(), _base(family), LORA,
            *_of("data", *(("source", "path") if text else ("source", "images")), "holdout"),
        )),
        Group("Machine", MACHINE),
        Group("Launch", (
            *_of("launch", "preset", "num_processes", "mixed_precision"),
            *_of("launch", "offload_optimizer", "offload_param", "offload_path"),
            *_of("launch", "bf16_optimizer_states", "cpu_checkpointing", "zero3_init"),
        )),
        Group("Batch", _of("train", "global_batch_size", "gradient_accumulation_steps",
                           "gradient_checkpointing", size)),
        Group("Optimizer", (
            _optimizer(), *_of("train", "optimizer_args", "learning_rate", "adam_weight_decay",
                               "adam_beta1", "adam_beta2", "max_grad_norm", "use_ema"),
        )),
        Group("Schedule", (
            *_of("phase", "until"),
            *_of("train", "lr_scheduler", "lr_scheduler_args", "lr_warmup_steps",
                 "lr_warmup_ratio", "lr_scheduler_steps"),
        )),
        Group("DeepSpeed's buckets and buffers", _of_deepspeed(), folded=True),
    )  # fmt: skip


LORA = Control(
    "lora.rank", "number", "Train a LoRA of this rank; empty: the whole model is trained."
)
MACHINE = (
    Control(
        "machine.gpu",
        "text",
        "A GPU by its name, as RTX 4090: its memory, its speed and its link to the host. Empty: "
        "this machine.",
        choices=tuple(gpu.name for gpu in GPUS),
    ),
    Control("machine.device_memory", "text", "Memory of one GPU, as 24 GiB; default: the GPU's."),
    Control(
        "machine.host_memory",
        "text",
        "Memory of the host, as 64 GiB: needed with a GPU that is named; default: this machine's.",
    ),
)
"""The machine that is planned for; it is no part of a configuration."""


def all_controls(family: str) -> dict[str, Control]:
    """Return a family's controls by their names."""
    return {one.name: one for group in groups(family) for one in group.controls}


def _of(section: str, *keys: str) -> tuple[Control, ...]:
    """Return the controls of a section's keys."""
    return tuple(_control(section, key) for key in keys)


def _control(section: str, key: str) -> Control:
    field = MODELS[section].model_fields[key]
    kinds = _plain_types(field.annotation)
    default = "" if field.is_required() else written(field.default)
    choices: tuple[str, ...] = ()
    kind: Kind = "text"
    if get_origin(field.annotation) is dict:
        kind = "values"
    elif literal := [one for one in kinds if get_origin(one) is Literal]:
        kind, choices = "choice", tuple(str(value) for one in literal for value in get_args(one))
    elif names := _enumerated(field.metadata):
        kind, choices = "choice", names
    elif kinds == [bool]:
        kind, choices = "choice", YES_NO
    elif set(kinds) & {int, float} and str not in kinds:
        kind = "number"
    name = f"{section}.{key}" if section else key
    about = plain(field.description or "")
    return Control(name, kind, about, default, choices)


def _enumerated(metadata: Sequence[object]) -> tuple[str, ...]:
    """Return the values that an annotation lists for a text; empty if it does not."""
    for one in metadata:
        if isinstance(one, WithJsonSchema) and one.json_schema:
            return tuple(one.json_schema.get("enum", ()))
    return ()


def _plain_types(annotation: Any) -> list[Any]:
    """Return the types of an annotation without Annotated, unions and None."""
    if get_origin(annotation) is Literal or not get_args(annotation):
        return [] if annotation is NoneType else [annotation]
    inner: Sequence[Any] = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        inner = inner[:1]
    return [found for one in inner for found in _plain_types(one)]


def _family() -> Control:
    about = plain(RunConfig.model_fields["family"].description or "")
    return Control("family", "choice", about, DEFAULT, tuple(FAMILIES))


def _base(family: str) -> Control:
    known = [name for one in read_shipped(family) for name in one.source.split(", ")]
    about = (
        "A model of config/models, or a folder or .safetensors file of yours, of which the headers "
        "are read: weights are not needed to plan."
    )
    return Control("base", "text", about, choices=(*known, "nano", "micro"))


def _optimizer() -> Control:
    field = TrainConfig.model_fields["optimizer"]
    names = tuple(one.title.lower() for one in optimizers.TABLE if not one.refused)
    return Control("train.optimizer", "choice", plain(field.description or ""), "adamw", names)


def _of_deepspeed() -> tuple[Control, ...]:
    """Return the keys of zero_optimization that go into DeepSpeed's file as they are."""
    found = []
    for key in DEEPSPEED.values():
        if key.fate != "passed_through" or not key.name.startswith(ZERO):
            continue
        if key.type not in ("integer", "number", "boolean"):
            continue
        default = "" if key.default is None else written(key.default)
        kind: Kind = "choice" if key.type == "boolean" else "number"
        about = key.reason or (
            f"DeepSpeed's key of that name; its default is {default}."
            if default
            else "DeepSpeed's key of that name; by default derived from the model's sizes or "
            "DeepSpeed's own."
        )
        choices = ("", *YES_NO) if key.type == "boolean" else ()
        found.append(Control(f"{DEEPSPEED_KEYS}{key.name}", kind, about, "", choices))
    return tuple(found)


def written(value: Any) -> str:
    """Write a value as a form shows it: as a file has it."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return scalar(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def plain(text: str) -> str:
    """Return a description without the marks of Markdown."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
