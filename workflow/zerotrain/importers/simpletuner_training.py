"""SimpleTuner's loss, timesteps, text lengths, token routes and optimizers."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerotrain.config.families import FAMILIES
from zerotrain.config.optimizers import find
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.key_values import assume_defaults, put_code, put_rows
from zerotrain.importers.keys import SIMPLETUNER, SIMPLETUNER_OPTIMIZERS, SIMPLETUNER_VALUES
from zerotrain.importers.program import drop_keys_of_others

SEQUENCE_LENGTHS: dict[str, int] = SIMPLETUNER_VALUES["sequence_lengths"]
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
    put_code(SIMPLETUNER_VALUES["code"], family, result)
    if family == "sdxl":
        result.attempt(_put_noise_offset, arguments, result)
    else:
        result.attempt(_put_flow, arguments, result)
    if family == "flux":
        assume_defaults(arguments, SIMPLETUNER, result, "train.flux_guidance_value")
    assume_defaults(arguments, SIMPLETUNER, result, "train.caption_dropout_probability")
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
        put_rows(arguments, SIMPLETUNER, result, SCALE)
    ours, given = "train.flow_shift", arguments.pop(SHIFT, None)
    if arguments.pop(AUTO_SHIFT, False):
        side = result.values.get("train.resolution", 1024)
        # The exponent of Flux's shift: 0.5 at 256 tokens, 1.15 at 4096.
        mu = 0.5 + (1.15 - 0.5) * ((side // 16) ** 2 - 256) / (4096 - 256)
        if mu > 700:  # beyond it no float is left
            raise PipelineError(
                f"{AUTO_SHIFT}: Flux's formula has no number at {side} pixels",
                hint=f"set {SHIFT} instead",
            )
        reason = f"Flux's formula at {side} pixels"
        result.keep(AUTO_SHIFT, True, ours, round(math.exp(mu), 4), reason)
        if given is not None:
            result.ignore(SHIFT, given, f"{AUTO_SHIFT} says it")
    elif given is None:
        assume_defaults(arguments, SIMPLETUNER, result, ours)
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


@dataclass(frozen=True)
class Settings:
    """One of our optimizers, and SimpleTuner's defaults for it."""

    ours: str
    betas: Sequence[float] | None = None
    eps: float | None = None
    weight_decay: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)


NAMES = {name: Settings(**row) for name, row in SIMPLETUNER_OPTIMIZERS.items()}
ADAMW = "adamw_bf16"
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
    if given == ADAMW:
        result.note("changed", ADAMW, None, OWN_MOMENT, "train.adam_beta1")
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
    names = ("optimizer_beta1", "optimizer_beta2")
    betas = [arguments.pop(name, None) for name in names]
    if None in betas:
        for name, value in zip(names, betas, strict=True):
            if value is not None:
                result.ignore(name, value, "SimpleTuner reads both or neither")
    else:
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
    given = str(arguments.get("optimizer", ADAMW))
    is_lora = "lora" in str(arguments.get("model_type", "lora"))
    rounded = is_lora and arguments.get("base_model_precision", "no_change") != "no_change"
    if dtype == "fp32" and rounded and given == ADAMW:
        result.note("changed", name, dtype, f"SimpleTuner takes {FP32} for {ADAMW}",
                  "train.optimizer", FP32)  # fmt: skip
        return FP32
    if dtype is not None:
        result.ignore(name, dtype, f"counts for {ADAMW} next to a base of fewer bits only")
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
