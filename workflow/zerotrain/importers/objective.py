"""Trainers' flags for the loss, mapped to the keys of config/objective.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.keys import SIMPLETUNER
from zerotrain.launch.keys import Key

OF_NOISE_SCHEDULE = ("prediction_type", "rescale_betas_zero_snr")
POSTERIOR = "the mean of the autoencoder's distribution; that program draws from it"
SEQUENCE_LENGTHS = {"sd3": 154, "flux": 512, "qwen_image": 1024}
"""Tokens of a caption in SimpleTuner; only sd3 reads tokenizer_max_length, up to this value."""
SHIFT, AUTO_SHIFT, UNIFORM, SCALE = (
    "flow_schedule_shift", "flow_schedule_auto_shift", "flow_use_uniform_schedule",
    "flow_sigmoid_scale",
)  # fmt: skip


def drop_keys_of_others(
    arguments: dict[str, Any], table: Mapping[str, Key], family: str, result: ImportedConfig
) -> None:
    """Remove arguments that do not apply to the family, which trainers accept anyway."""
    kind = FAMILIES[family]
    others = {f"train.{key}" for other in FAMILIES.values() for key in other.objective}
    others -= {f"train.{key}" for key in kind.objective}
    if not kind.noise_schedule:
        others |= set(OF_NOISE_SCHEDULE)
    if not kind.text_length:
        others.add("cache.max_sequence_length")
    for name in [name for name in arguments if table[name].ours in others]:
        result.ignore(name, arguments.pop(name), f"{family} has no such thing")


def put_objective(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set SimpleTuner's loss, timesteps, text length and caption dropout.

    Raises:
        PipelineError: a value is not supported, or would train something else here.
    """
    family = result.values.get("family")
    if family is None:
        return
    result.attempt(_put_text_length, arguments, family, result)
    drop_keys_of_others(arguments, SIMPLETUNER, family, result)
    result.note("changed", "latents", None, POSTERIOR)
    if family == "sdxl":
        result.attempt(_put_noise_offset, arguments, result)
        result.note(
            "changed", "time_ids", None,
            "size and crop of the image file; SimpleTuner says the size before its crop, and zeros "
            "where a caption is dropped",
        )  # fmt: skip
    else:
        result.attempt(put_flow, arguments, result)
    if family == "flux" and "flux_guidance_value" not in arguments:
        result.assume("train.flux_guidance_value", 1.0, "SimpleTuner's default")
    if "caption_dropout_probability" not in arguments:
        result.assume("train.caption_dropout_probability", 0.1, "SimpleTuner's default")
    _check_loss(arguments, family, result)


def _put_text_length(arguments: dict[str, Any], family: str, result: ImportedConfig) -> None:
    """Set the tokens of a caption.

    Source: check_user_config of simpletuner/helpers/models/{flux,sd3}/model.py.
    """
    name, ours = "tokenizer_max_length", "cache.max_sequence_length"
    anything = "i_know_what_i_am_doing"
    unlimited = arguments.pop(anything, None)
    if unlimited is not None:
        result.ignore(anything, unlimited, "lifts limits of SimpleTuner")
    if family not in SEQUENCE_LENGTHS:
        return
    most, given = SEQUENCE_LENGTHS[family], arguments.get(name)
    if family == "flux" and arguments.get("model_flavour") == "schnell":
        most = 256
    if given is None:
        result.assume(ours, most, f"SimpleTuner's {name}")
    elif family == "sd3" and (given <= most or unlimited):
        result.keep(name, given, ours)
    else:
        reason = "SimpleTuner's most" if family == "sd3" else f"SimpleTuner ignores {name} here"
        result.put("changed", name, given, ours, most, reason)


def _check_loss(arguments: dict[str, Any], family: str, result: ImportedConfig) -> None:
    """Check that the loss is computed in the same way here.

    Source: compute_scheduled_huber_c of simpletuner/helpers/models/common.py at bc8e6ab7.
    """
    loss, schedule = arguments.get("loss_type", "l2"), arguments.get("huber_schedule", "snr")
    if loss == "l2":
        for name in ("huber_c", "huber_schedule"):
            if name in arguments:
                result.ignore(name, arguments.pop(name), "belongs to loss_type huber")
    elif family != "sdxl" and schedule == "snr":
        raise PipelineError(
            f"loss_type: {loss} with huber_schedule snr, SimpleTuner's default: for {family} its "
            "threshold rises with the noise to 1; here it falls from 1 to huber_c",
            hint="set huber_schedule to constant or exponential; `--skip loss_type` trains by l2",
        )


def _put_noise_offset(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the offset noise: a switch, its scale, and the share of batches with it."""
    switch, scale, share = "offset_noise", "noise_offset", "noise_offset_probability"
    on, given = arguments.pop(switch, False), arguments.pop(scale, None)
    probability = arguments.pop(share, None)
    ours = "train.noise_offset"
    for name, value in ((scale, given), (share, probability)):
        if value is not None and not on:
            result.ignore(name, value, f"{switch} is not on")
    if not on:
        return
    drawn = SIMPLETUNER[share].default if probability is None else probability
    if drawn != 1:
        raise PipelineError(
            f"{switch}: {share} is {drawn}, so that a part of the batches has the offset; here "
            "every sample has it",
            hint=f"set {share}: 1.0, or take {switch} out",
        )
    result.note("kept", share, probability, "every sample has the offset", ours)
    if given is not None:
        result.keep(scale, given, ours)
    result.put("kept", switch, on, ours, 0.1 if given is None else given, "")


def put_flow(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set SimpleTuner's draw of timesteps: sigmoid(flow_sigmoid_scale x normal), shifted.

    Source: simpletuner/helpers/configuration/cmd_args.py, the help of these flags.

    Raises:
        PipelineError: a scale or shift is invalid.
    """
    scale = arguments.pop(SCALE, None)
    if arguments.pop(UNIFORM, False):
        result.keep(UNIFORM, True, "train.weighting_scheme", "none")
        if scale is not None:
            result.ignore(SCALE, scale, f"{UNIFORM} draws without it")
    else:
        result.assume("train.weighting_scheme", "logit_normal", "SimpleTuner's sigmoid of a normal")
        if scale is not None and scale <= 0:
            raise PipelineError(f"{SCALE} is {scale}", hint="give a number above 0")
        if scale is not None:
            result.keep(SCALE, scale, "train.logit_std")
    _put_shift(arguments, result)


def _put_shift(arguments: dict[str, Any], result: ImportedConfig) -> None:
    ours, given = "train.flow_shift", arguments.pop(SHIFT, None)
    if arguments.pop(AUTO_SHIFT, False):
        side = result.values.get("train.resolution", 1024)
        reason = f"Flux's formula at {side} pixels"
        result.keep(AUTO_SHIFT, True, ours, round(math.exp(_mu((side // 16) ** 2)), 4), reason)
        if given is not None:
            result.ignore(SHIFT, given, f"{AUTO_SHIFT} says it")
    elif given is None:
        result.assume(ours, 3.0, "SimpleTuner's default")
    elif given < 0:
        raise PipelineError(f"{SHIFT} is {given}", hint="give a number from 0 on")
    else:
        reason = "no shift" if given == 0 else ""
        result.keep(SHIFT, given, ours, float(given) or 1.0, reason)


def _mu(tokens: int) -> float:
    """Return the exponent of Flux's shift for this many tokens: 0.5 at 256, 1.15 at 4096."""
    return 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)
