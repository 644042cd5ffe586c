"""SimpleTuner's loss, timesteps, text lengths and token routes, as keys of config/objective.py."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.keys import SIMPLETUNER
from zerotrain.importers.program import drop_keys_of_others

POSTERIOR = "the mean of the autoencoder's distribution; that program draws from it"
DEFAULT = "SimpleTuner's default"
SEQUENCE_LENGTHS = {"sd3": 154, "flux": 512, "qwen_image": 1024}
"""Tokens of a caption in SimpleTuner; only sd3 reads tokenizer_max_length, up to this value."""
SHIFT, AUTO_SHIFT, UNIFORM, SCALE = (
    "flow_schedule_shift", "flow_schedule_auto_shift", "flow_use_uniform_schedule",
    "flow_sigmoid_scale",
)  # fmt: skip


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
        result.attempt(_put_flow, arguments, result)
    if family == "flux" and "flux_guidance_value" not in arguments:
        result.assume("train.flux_guidance_value", 1.0, DEFAULT)
    if "caption_dropout_probability" not in arguments:
        result.assume("train.caption_dropout_probability", 0.1, DEFAULT)
    # compute_scheduled_huber_c of simpletuner/helpers/models/common.py at bc8e6ab7.
    loss, schedule = arguments.get("loss_type", "l2"), arguments.get("huber_schedule", "snr")
    if loss == "l2":
        names = ("huber_c", "huber_schedule")
        result.ignore_all(arguments, names, "belongs to loss_type huber")
    elif family != "sdxl" and schedule == "snr":
        raise PipelineError(
            f"loss_type: {loss} with huber_schedule snr, SimpleTuner's default: for {family} its "
            "threshold rises with the noise to 1; here it falls from 1 to huber_c",
            hint="set huber_schedule to constant or exponential; `--skip loss_type` trains by l2",
        )


def _put_text_length(arguments: dict[str, Any], family: str, result: ImportedConfig) -> None:
    """Set the tokens of a caption.

    Source: check_user_config of simpletuner/helpers/models/{flux,sd3}/model.py.
    """
    name, ours = "tokenizer_max_length", "cache.max_sequence_length"
    anything = "i_know_what_i_am_doing"
    unlimited = arguments.get(anything)
    result.ignore_all(arguments, [anything], "lifts limits of SimpleTuner")
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


def _put_noise_offset(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set the offset noise: a switch, its scale, and the share of batches with it."""
    switch, scale, share = "offset_noise", "noise_offset", "noise_offset_probability"
    on = arguments.pop(switch, False)
    if not on:
        result.ignore_all(arguments, (scale, share), f"{switch} is not on")
        return
    given, probability = arguments.pop(scale, None), arguments.pop(share, None)
    ours = "train.noise_offset"
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


def _put_flow(arguments: dict[str, Any], result: ImportedConfig) -> None:
    """Set SimpleTuner's draw of timesteps: sigmoid(flow_sigmoid_scale x normal), shifted.

    Source: simpletuner/helpers/configuration/cmd_args.py, the help of these flags.
    """
    if arguments.pop(UNIFORM, False):
        result.keep(UNIFORM, True, "train.weighting_scheme", "none")
        result.ignore_all(arguments, [SCALE], f"{UNIFORM} draws without it")
    else:
        result.assume("train.weighting_scheme", "logit_normal", "SimpleTuner's sigmoid of a normal")
        scale = arguments.pop(SCALE, None)
        if scale is not None and scale <= 0:
            raise PipelineError(f"{SCALE} is {scale}", hint="give a number above 0")
        if scale is not None:
            result.keep(SCALE, scale, "train.logit_std")
    ours, given = "train.flow_shift", arguments.pop(SHIFT, None)
    if arguments.pop(AUTO_SHIFT, False):
        side = result.values.get("train.resolution", 1024)
        # The exponent of Flux's shift: 0.5 at 256 tokens, 1.15 at 4096.
        mu = 0.5 + (1.15 - 0.5) * ((side // 16) ** 2 - 256) / (4096 - 256)
        reason = f"Flux's formula at {side} pixels"
        result.keep(AUTO_SHIFT, True, ours, round(math.exp(mu), 4), reason)
        if given is not None:
            result.ignore(SHIFT, given, f"{AUTO_SHIFT} says it")
    elif given is None:
        result.assume(ours, 3.0, DEFAULT)
    elif given < 0:
        raise PipelineError(f"{SHIFT} is {given}", hint="give a number from 0 on")
    else:
        reason = "no shift" if given == 0 else ""
        result.keep(SHIFT, given, ours, float(given) or 1.0, reason)


NAME = "tread_config"


def put_token_routes(arguments: Mapping[str, Any], result: ImportedConfig) -> None:
    """Set train.tread_config: the routes by which image tokens bypass layers.

    Source: simpletuner/helpers/training/tread.py, and helpers/models/{flux,sd3}/transformer.py at
    bc8e6ab7. Its manual describes importance-based selection; its code draws at random (l1_reg is
    0).

    Raises:
        PipelineError: there are no routes, or the family's tokens cannot be routed here.
    """
    given = arguments.get(NAME)
    if not given:
        return
    family = str(result.values.get("family"))
    if family in FAMILIES and not FAMILIES[family].token_routing:
        able = ", ".join(name for name, kind in FAMILIES.items() if kind.token_routing)
        raise PipelineError(
            f"{NAME}: tokens of {family} cannot be routed here, only those of {able}",
            hint=f"`--skip {NAME}` trains every layer on all tokens",
        )
    config = given
    if isinstance(given, str):  # a Python dictionary's text, as in command lines
        try:
            config = ast.literal_eval(given)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            config = None
    if not isinstance(config, Mapping):
        raise PipelineError(f"{NAME}: must be keys with values", hint='such as {"routes": [{...}]}')
    routes = config.get("routes")
    if not isinstance(routes, list) or not routes:
        raise PipelineError(f"{NAME}: names no routes", hint="add a list `routes`")
    result.keep(NAME, given, "train.tread_config", {"routes": routes})
