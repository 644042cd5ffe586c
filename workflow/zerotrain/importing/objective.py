"""What a trainer's flags say of the loss, in the keys of config/objective.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.families import FAMILIES
from zerotrain.importing.draft import Draft
from zerotrain.importing.keys import Key

OF_NOISE_SCHEDULE = ("prediction_type", "rescale_betas_zero_snr")
SHIFT, AUTO_SHIFT, UNIFORM, SCALE = (
    "flow_schedule_shift", "flow_schedule_auto_shift", "flow_use_uniform_schedule",
    "flow_sigmoid_scale",
)  # fmt: skip


def drop_keys_of_others(
    arguments: dict[str, Any], table: Mapping[str, Key], family: str, draft: Draft
) -> None:
    """Take out arguments that mean nothing to the family, which trainers accept all the same."""
    kind = FAMILIES[family]
    others = {f"train.{key}" for other in FAMILIES.values() for key in other.objective}
    others -= {f"train.{key}" for key in kind.objective}
    if not kind.noise_schedule:
        others |= set(OF_NOISE_SCHEDULE)
    if not kind.text_length:
        others.add("cache.max_sequence_length")
    for name in [name for name in arguments if table[name].ours in others]:
        draft.ignore(name, arguments.pop(name), f"{family} has no such thing")


def put_noise_offset(arguments: dict[str, Any], draft: Draft) -> None:
    """SimpleTuner's offset noise: a switch, and its scale."""
    switch, scale = "offset_noise", "noise_offset"
    on, given = arguments.pop(switch, False), arguments.pop(scale, None)
    ours = "train.noise_offset"
    if given is not None and on:
        draft.keep(scale, given, ours)
    elif given is not None:
        draft.ignore(scale, given, f"{switch} is not on")
    if on:
        reason = (
            "added to every sample; SimpleTuner adds it to a quarter where nothing else is said"
        )
        draft.put("changed", switch, on, ours, 0.1 if given is None else given, reason)


def put_flow(arguments: dict[str, Any], draft: Draft) -> None:
    """SimpleTuner's draw of timesteps: sigmoid(flow_sigmoid_scale x normal), shifted.

    Source: simpletuner/helpers/configuration/cmd_args.py, the help of these flags.

    Raises:
        PipelineError: a scale or shift that cannot be.
    """
    scale = arguments.pop(SCALE, None)
    if arguments.pop(UNIFORM, False):
        draft.keep(UNIFORM, True, "train.weighting_scheme", "none")
        if scale is not None:
            draft.ignore(SCALE, scale, f"{UNIFORM} draws without it")
    else:
        draft.default("train.weighting_scheme", "logit_normal", "SimpleTuner's sigmoid of a normal")
        if scale is not None and scale <= 0:
            raise PipelineError(f"{SCALE} is {scale}", hint="give a number above 0")
        if scale is not None:
            draft.keep(SCALE, scale, "train.logit_std")
    _put_shift(arguments, draft)


def _put_shift(arguments: dict[str, Any], draft: Draft) -> None:
    ours, given = "train.flow_shift", arguments.pop(SHIFT, None)
    if arguments.pop(AUTO_SHIFT, False):
        side = draft.values.get("train.resolution", 1024)
        reason = f"Flux's formula at {side} pixels"
        draft.keep(AUTO_SHIFT, True, ours, round(math.exp(_mu((side // 16) ** 2)), 4), reason)
        if given is not None:
            draft.ignore(SHIFT, given, f"{AUTO_SHIFT} says it")
    elif given is None:
        draft.default(ours, 3.0, "SimpleTuner's default")
    elif given < 0:
        raise PipelineError(f"{SHIFT} is {given}", hint="give a number from 0 on")
    else:
        reason = "no shift" if given == 0 else ""
        draft.keep(SHIFT, given, ours, float(given) or 1.0, reason)


def _mu(tokens: int) -> float:
    """Exponent of Flux's shift for so many image tokens: 0.5 at 256, 1.15 at 4096."""
    return 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)
