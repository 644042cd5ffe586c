"""Mixed precision and fp16's loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.config.launch import Fp16Config
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.importers.key_values import drop_dependents
from zerotrain.importers.program import SurroundingSettings
from zerotrain.launch.keys import DEEPSPEED

OURS = "launch.mixed_precision"
CHOICES = ("bf16", "fp16", "no")
DEEPSPEED_HAS = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}


def read_precision(
    flat: dict[str, Any], result: ImportedConfig, context: SurroundingSettings
) -> str:
    """Decide the precision; fp16.enabled and bf16.enabled of the file may be "auto".

    Raises:
        PipelineError: two places contradict each other, or there is neither a value nor a choice.
    """
    given, source = context.precision, context.precision_source
    otherwise, choose = context.precision_default, context.choose
    if given is not None and given not in CHOICES:
        raise PipelineError(
            f"{source}: mixed precision {given!r}", hint=f"give one of {', '.join(CHOICES)}"
        )
    switches = {kind: flat.get(f"{kind}.enabled") for kind in ("fp16", "bf16")}
    on = [kind for kind, value in switches.items() if value is True]
    if len(on) == 2:
        raise PipelineError(
            "fp16.enabled and bf16.enabled are both true", hint="turn one of them off"
        )
    if on and given not in (None, on[0]):
        raise PipelineError(
            f"{on[0]}.enabled is true, but {source} says {given}", hint="let both say the same"
        )
    if given in switches and switches[given] is False:
        raise PipelineError(
            f"{given}.enabled is false, but {source} says {given}", hint="let both say the same"
        )
    open_ = [f"{kind}.enabled" for kind, value in switches.items() if value == AUTO]
    precision = given or (on[0] if on else None)
    if precision is None and open_:
        what = " and ".join(open_) + (" are" if len(open_) > 1 else " is") + ' "auto"'
        if otherwise[0] != "no":
            precision, source = otherwise
        elif choose is not None:
            precision, source = choose()
        else:
            raise PipelineError(
                f"{what}, and nothing says which precision is meant",
                hint="set mixed_precision next to it: bf16, fp16 or no",
            )
    for kind, value in switches.items():
        key = f"{kind}.enabled"
        if value == AUTO:
            result.resolve(key, OURS, precision, source)
        elif value is not None:
            result.keep(key, value, OURS, precision or "no")
    if OURS not in result.values and given is not None:
        result.keep(source, given, OURS)
    elif OURS not in result.values:
        result.assume(OURS, *otherwise)
    return str(result.values[OURS])


def say_bf16_weights(
    result: ImportedConfig, config: Mapping[str, Any], program: str, *, in_bf16: bool
) -> None:
    """Report that a program trains bf16 weights, while a run's are float32.

    DeepSpeed keeps a float32 copy of each weight, so under it there is no difference.

    Args:
        result: Receives the note.
        config: accelerate's configuration of the training.
        program: The training program.
        in_bf16: Whether it casts the trained weights to bf16.
    """
    if in_bf16 and str(config.get("distributed_type", "")).upper() != "DEEPSPEED":
        result.note(
            "changed", "trained weights", None,
            f"float32; {program} rounds them to bf16 after each step, as DeepSpeed is not on",
        )  # fmt: skip


def read_loss_scale(flat: dict[str, Any], result: ImportedConfig, precision: str) -> None:
    """Set the five keys of fp16's loss scale, with DeepSpeed's defaults for missing ones."""
    drop_dependents(flat, DEEPSPEED, result, fp16=precision == "fp16")
    for name in DEEPSPEED_HAS if precision == "fp16" else ():
        key, ours = f"fp16.{name}", f"launch.fp16.{name}"
        value = flat.get(key)
        if value in (None, AUTO):
            value, reason = DEEPSPEED_HAS[name], "DeepSpeed's own, where the file has none"
            if value != getattr(Fp16Config(), name):
                result.assume(ours, value, reason)
            if key in flat:
                result.note("resolved", key, AUTO, reason, ours)
        elif value == getattr(Fp16Config(), name):
            result.note("kept", key, value, "what the launch files say anyway", ours)
        else:
            result.keep(key, value, ours)
