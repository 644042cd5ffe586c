"""Mixed precision and fp16's loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.draft import AUTO, Draft
from zerotrain.importing.keys_deepspeed import FP16_KEYS
from zerotrain.launch.resolved import FP16

OURS = "launch.mixed_precision"
CHOICES = ("bf16", "fp16", "no")
DEEPSPEED_HAS = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
Ask = Callable[[str], str]
"""Asks the user which precision; given where there is someone to ask."""


def read_precision(
    flat: dict[str, Any],
    draft: Draft,
    given: str | None,
    source: str,
    otherwise: tuple[str, str],
    ask: Ask | None,
) -> str:
    """Settle the precision; never by guessing.

    Args:
        flat: The file's keys; fp16.enabled and bf16.enabled may be "auto".
        draft: Gets mixed_precision.
        given: What is said beside the file, or None.
        source: What says it.
        otherwise: What holds where the file has neither section, and why.
        ask: Where nothing says it.

    Raises:
        PipelineError: two places contradict each other, or nothing says it and nobody can be asked.
    """
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
        if ask is None:
            raise PipelineError(
                f"{what}, and nothing says which precision is meant",
                hint="say it: --precision bf16, fp16 or no; where a run points at the file, "
                "mixed_precision beside it",
            )
        precision, source = ask(what), "your answer"
    for kind, value in switches.items():
        key = f"{kind}.enabled"
        if value == AUTO:
            draft.resolve(key, OURS, precision, source)
        elif value is not None:
            draft.keep(key, value, OURS, precision or "no")
    if OURS not in draft.values and given is not None:
        draft.keep(source, given, OURS)
    elif OURS not in draft.values:
        draft.default(OURS, *otherwise)
    return str(draft.values[OURS])


def read_loss_scale(flat: dict[str, Any], draft: Draft, precision: str) -> None:
    """The five keys of fp16's loss scale; where they are absent DeepSpeed's own values hold."""
    for name in FP16_KEYS:
        key, ours = f"fp16.{name}", f"launch.fp16.{name}"
        if precision != "fp16":
            if key in flat:
                draft.ignore(key, flat[key], "fp16 is not on: no loss is scaled")
            continue
        value = flat.get(key)
        if value in (None, AUTO):
            value, reason = DEEPSPEED_HAS[name], "DeepSpeed's own, where the file has none"
            if value != FP16[name]:
                draft.default(ours, value, reason)
            if key in flat:
                draft.say("resolved", key, AUTO, reason, ours)
        elif value == FP16[name]:
            draft.say("kept", key, value, "what the launch files say anyway", ours)
        else:
            draft.keep(key, value, ours)
