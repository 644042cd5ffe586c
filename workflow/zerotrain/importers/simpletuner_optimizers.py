"""SimpleTuner's optimizers by name, with the numbers in its code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerotrain.config.optimizers import find
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.keys import SIMPLETUNER_OPTIMIZERS


@dataclass(frozen=True)
class Settings:
    """One of our optimizers, and SimpleTuner's defaults for it."""

    ours: str
    betas: Sequence[float] | None = None
    eps: float | None = None
    weight_decay: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)


NAMES = {name: Settings(**row) for name, row in SIMPLETUNER_OPTIMIZERS.items()}
DEFAULT = "adamw_bf16"
FP32 = "optimi-adamw"
"""SimpleTuner's replacement for it if the quantized base computes in fp32."""
OWN_MOMENT = (
    "AdamW by its numbers, with weights in fp32; SimpleTuner's keeps them in bf16, and its first "
    "moment is gradient + 0.09 moment: steps are a tenth larger and follow the last gradient"
)
"""simpletuner/helpers/training/optimizers/adamw_bfloat16: add_stochastic_ scales the wrong one."""


def settings_of(arguments: dict[str, Any], result: ImportedConfig) -> dict[str, Any]:
    """Return the optimizer's values by our keys, as if in the program's code.

    Args:
        arguments: SimpleTuner's arguments; optimizer_config, optimizer_beta* and
            base_model_default_dtype are removed.
        result: Receives notes on those, and train.optimizer_args.

    Raises:
        PipelineError: the optimizer has no equivalent here, or an argument is unknown.
    """
    given = _in_effect(arguments, result)
    known = NAMES.get(given)
    if known is None:
        raise PipelineError(
            f"optimizer: SimpleTuner's {given} computes what none of ours does",
            hint=f"choose one of {', '.join(NAMES)}",
        )
    found: dict[str, Any] = {"train.optimizer": known.ours}
    extra = dict(known.arguments)
    if given == DEFAULT:
        result.note("changed", DEFAULT, None, OWN_MOMENT, "train.adam_beta1")
    if known.betas is not None:
        found |= dict(zip(("train.adam_beta1", "train.adam_beta2"), known.betas, strict=True))
    if known.eps is not None:
        found["train.adam_epsilon"] = known.eps
    found["train.adam_weight_decay"] = known.weight_decay
    ours = {"eps": "train.adam_epsilon", "weight_decay": "train.adam_weight_decay"}
    for name, value in _parse(arguments.pop("optimizer_config", None)).items():
        if name in ours and ours[name] in found:
            found[ours[name]] = value
        elif name in find(known.ours)[0].arguments:
            extra[name] = value
        else:
            raise PipelineError(
                f"optimizer_config: {name} is no argument of {known.ours}", hint="take it out"
            )
        result.note(
            "kept", f"optimizer_config {name}", value, "", ours.get(name, "train.optimizer")
        )
    betas = [arguments.pop(name, None) for name in ("optimizer_beta1", "optimizer_beta2")]
    if None not in betas:
        if known.betas is None:
            extra["betas"] = betas
        else:
            found |= dict(zip(("train.adam_beta1", "train.adam_beta2"), betas, strict=True))
        result.note("kept", "optimizer_beta1 and optimizer_beta2", betas, "", "train.optimizer")
    defaults = find(known.ours)[0].arguments
    extra = {k: v for k, v in extra.items() if v != _listed(defaults.get(k))}
    if extra:
        result.values["train.optimizer_args"] = extra
        result.note("default", "train.optimizer_args", None, "in SimpleTuner's code",
                  "train.optimizer_args", extra)  # fmt: skip
    return found


def _in_effect(arguments: dict[str, Any], result: ImportedConfig) -> str:
    """Return the optimizer's name, or its replacement for a quantized base in fp32.

    Source: init_precision of simpletuner/helpers/training/trainer.py at bc8e6ab7.
    """
    name, dtype = "base_model_default_dtype", arguments.get("base_model_default_dtype")
    given = str(arguments.get("optimizer", DEFAULT))
    is_lora = "lora" in str(arguments.get("model_type", "lora"))
    rounded = is_lora and arguments.get("base_model_precision", "no_change") != "no_change"
    if dtype == "fp32" and rounded and given == DEFAULT:
        result.note("changed", name, dtype, f"SimpleTuner takes {FP32} for {DEFAULT}",
                  "train.optimizer", FP32)  # fmt: skip
        return FP32
    if dtype is not None:
        result.ignore(name, dtype, f"counts for {DEFAULT} next to a base of fewer bits only")
    return given


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _parse(text: str | None) -> dict[str, Any]:
    """Parse `eps=1e-6,weight_decay=0.0`."""
    found: dict[str, Any] = {}
    for pair in (text or "").split(","):
        name, equals, value = pair.strip().partition("=")
        if not pair.strip():
            continue
        if not equals:
            raise PipelineError(f"optimizer_config: {pair!r} is no NAME=VALUE", hint="correct it")
        words = {"true": True, "false": False, "none": None}
        try:
            found[name] = words[value.lower()] if value.lower() in words else float(value)
        except ValueError:
            found[name] = value
    return found
