"""Adapters without their library: which layers get a LoRA, which methods of peft can be trained.

Keys and defaults of a method are those of its configuration class, as config/peft.json holds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from zerotrain.artifact.documents import read_json
from zerotrain.config.suggestions import did_you_mean
from zerotrain.errors import PipelineError

ALL_LINEAR = "all-linear"
Targets: TypeAlias = "Sequence[str] | str | None"
"""Ends of layers' names; ALL_LINEAR; or None for the attention's projections."""
ATTENTION = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "SelfAttention.q", "SelfAttention.k"),
    *("SelfAttention.v", "SelfAttention.o", "EncDecAttention.q", "EncDecAttention.k"),
    *("EncDecAttention.v", "EncDecAttention.o", "query_key_value", "c_attn"),
)
"""Projections of an attention, as the models of diffusers and transformers name them."""
NO_LAYER = re.compile(r"(^|\.)(shared|lm_head|wte|wpe|relative_attention_bias|\w*embed(?!der)\w*)$")
"""Tables of tokens and places, and the head: their weights look like those of linear layers. An
`embedder`, as in Flux, is one."""


FUSED = re.compile(
    r"(single_transformer_blocks\.\d+)\.(?:attn\.to_[qkv]|proj_mlp)"
    r"|(transformer_blocks\.\d+\.attn\.to_)[qkv]"
    r"|(transformer_blocks\.\d+\.attn\.add_)[qkv]_proj"
)
"""Layers of Flux that are one layer in its original files: linear1, img_attn.qkv, txt_attn.qkv."""

PEFT_TYPE = "peft_type"
KEYS = Path(__file__).parents[3] / "config" / "peft.json"
OURS = {
    "bias": "the base's biases stay as they are",
    "auto_mapping": "it is filled in by the export",
    "base_model_name_or_path": "`base` says it",
    "inference_mode": "training sets it",
    "modules_to_save": "whole modules are trained without an adapter: trainable_parameters",
    "peft_type": "it is the method",
    "peft_version": "it is filled in by the export",
    "revision": "`revision` next to `base` sets it",
    "task_type": "`family` says it",
}
"""Keys of peft's classes that a configuration does not take, and why."""


@dataclass(frozen=True)
class Method:
    """A way of adapting a model."""

    title: str
    changes: Literal["linear", "any"] = "linear"
    """Linear layers; or convolutions as well."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What is meant where the user says nothing, if not peft's own."""


METHODS: Mapping[str, Method] = {
    "C3A": Method("C3A"),
    "FOURIERFT": Method("FourierFT"),
    "GLORA": Method("GLoRA"),
    "GRALORA": Method("GraLoRA"),
    "HIRA": Method("HiRA", "any"),
    "HRA": Method("HRA", "any"),
    # peft's own would be a table of the layers that each architecture's paper chose.
    "IA3": Method("(IA)3", "any", settings={"feedforward_modules": []}),
    "LOHA": Method("LoHa", "any"),
    "LOKR": Method("LoKr", "any"),
    "MISS": Method("MiSS"),
    "OFT": Method("OFT", "any"),
    "PEANUT": Method("PEANuT"),
    "ROAD": Method("RoAd"),
}
_SHARED = "its layers share projections that lie outside of them, which ZeRO-3 does not gather"
_DECOMPOSED = "it keeps parts of the base's weights in buffers, which no training state holds"
_PLACES = "it chooses entries of the weights and keeps their places, which no training state holds"
_PROMPT = "it trains tokens before a text, and no layer"
_TASKS = "it needs a task number with each sample"
REFUSED: Mapping[str, str] = {
    "ADALORA": "it takes ranks away by a call of its own after each step",
    "ADAMSS": _DECOMPOSED,
    "ADAPTION_PROMPT": "it replaces the attention of two architectures and is no part of a layer",
    "BEFT": "it cannot be merged into the base's weights",
    "BOFT": "peft compiles an extension for it with a compiler of its own choice, after which "
    "DeepSpeed's ops are compiled again",
    "CARTRIDGE": "it begins with what the model makes of a text of its own",
    "CPT": "it begins with the tokens of examples, and masks them in the loss",
    "DEFT": "its pass reads the base's weights themselves, which ZeRO-3 has taken apart",
    "DELORA": _DECOMPOSED,
    "FROD": _SHARED,
    "LILY": "its layers share factors, which have several names then",
    "LORA": "it has a section of its own, `lora`",
    "LN_TUNING": "it trains norms: trainable_parameters does so without an adapter",
    "MULTITASK_PROMPT_TUNING": _TASKS,
    "OSF": "it changes the base's own weights",
    "POLY": _TASKS,
    "PREFIX_TUNING": _PROMPT,
    "PROMPT_TUNING": _PROMPT,
    "PSOFT": _DECOMPOSED,
    "PVERA": _SHARED,
    "P_TUNING": _PROMPT,
    "RANDLORA": _SHARED,
    "SHADOW": "it trains a second model next to the first",
    "SHIRA": _PLACES,
    "SUPERTUNING": _PLACES,
    "TINYLORA": _SHARED,
    "TRAINABLE_TOKENS": _DECOMPOSED,
    "UNILORA": _SHARED,
    "VBLORA": _SHARED,
    "VERA": _SHARED,
    "WAVEFT": "its passes depend on values, and a plan has none",
    "XLORA": "it mixes adapters that have been trained before",
}


FORMS = ("peft", "merged")
"""What an adapter of these methods can be exported to."""


@cache
def keys() -> dict[str, dict[str, Any]]:
    """Read the keys of each method with their defaults."""
    found: dict[str, dict[str, Any]] = read_json(KEYS)
    return found


def read_peft(value: Any) -> dict[str, Any]:
    """Check the section `peft` of a configuration: a method and keys of its class.

    Raises:
        ValueError: the method is unknown or refused, or a key is not one of its own or of another
            type.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get(PEFT_TYPE), str):
        raise ValueError(f"names no method: give {PEFT_TYPE}, one of {', '.join(METHODS)}")
    name = value[PEFT_TYPE].upper()
    if name in REFUSED:
        raise ValueError(
            f"{PEFT_TYPE} {name} is not trained here: {REFUSED[name]}; choose one of "
            f"{', '.join(METHODS)}"
        )
    if name not in METHODS:
        raise ValueError(
            f"{PEFT_TYPE} {value[PEFT_TYPE]!r} is no method of peft"
            + f"; {did_you_mean(name, METHODS) or 'choose one of ' + ', '.join(METHODS)}"
        )
    settings = {key: given for key, given in value.items() if key != PEFT_TYPE}
    for key, given in settings.items():
        _check_key(name, key, given)
    return {PEFT_TYPE: name, **settings}


def method_of(adapter: Mapping[str, Any] | None) -> Method | None:
    """Return the method of an adapter's values; None for LoRA, which has its own section."""
    return METHODS[adapter[PEFT_TYPE]] if adapter and PEFT_TYPE in adapter else None


def check_format_supported(to: str | None, method: str) -> None:
    """Check that an adapter of the method can have a form, and that one is chosen.

    Raises:
        PipelineError: saying which it can have.
    """
    title = METHODS[method].title
    hint = f"choose --to {' or --to '.join(FORMS)}"
    if to is None:
        raise PipelineError(
            f"--to is missing: an adapter by {title} is converted to its own forms", hint=hint
        )
    if to not in FORMS:
        raise PipelineError(
            f"--to {to}: an adapter by {title} is no LoRA, and this form holds no other", hint=hint
        )


def _check_key(name: str, key: str, given: Any) -> None:
    if key in OURS:
        raise ValueError(f"{key} is not given here: {OURS[key]}")
    known = keys()[name]
    if key not in known:
        raise ValueError(
            f"{key} is no key of {name}"
            + f"; {did_you_mean(key, known) or 'its keys are ' + ', '.join(known)}"
        )
    default = known[key]
    if type(default) in (int, float) and type(given) not in (int, float):
        raise ValueError(f"{key} of {name} is a number, {default!r} by default, and not {given!r}")
    if key == "target_modules" and not given:
        raise ValueError("target_modules names no layer; leave it out for the default")


def stack_of(layer: str) -> str:
    """Name the original layer that this one is a part of; its own name if it is whole."""
    found = FUSED.fullmatch(layer)
    return next(filter(None, found.groups())) if found else layer


def is_target(layer: str, targets: Sequence[str]) -> bool:
    """Return whether a layer's name ends in one of these, at whole components."""
    return any(f".{layer}".endswith(f".{target}") for target in targets)


def is_excluded(layer: str, entries: Sequence[str]) -> bool:
    """Return whether base_model_exclude_modules names a layer.

    An entry is an end at whole components, or, after a `^`, a whole name.
    """
    return f"^{layer}" in entries or is_target(layer, entries)


def is_targeted(layer: str, shape: Sequence[int], targets: Targets) -> bool:
    """Return whether a layer whose weight has this shape gets an adapter."""
    if targets == ALL_LINEAR:
        return len(shape) == 2 and NO_LAYER.search(layer) is None
    assert not isinstance(targets, str)
    return is_target(layer, ATTENTION if targets is None else targets)
