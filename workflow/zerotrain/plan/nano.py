"""The parts of the small models that families build from a seed, without their weights."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from zerotrain.families import LANGUAGE_MODELS, language_nano, nano
from zerotrain.plan.architecture import Part

SIDE = 256
"""Pixels. It is recorded in the configuration and changes no parameter; SD3 has positions for no
larger images."""
BYTES = 256


class _Vocabulary:
    """A tokenizer with as many tokens as one of a small model can have."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def nano_parts(family: str, preset: str) -> dict[str, Part]:
    """The models of a family's preset, text at its largest vocabulary.

    Args:
        family: One with a module `<family>_nano`.
        preset: `nano` or `micro`.
    """
    module = importlib.import_module(f"zerotrain.families.{family}_nano")
    if family in LANGUAGE_MODELS:
        values = module.nano_config(_Vocabulary(language_nano.VOCABULARY), preset)
        return {"model": Part("transformers", module.CLASS.__name__, values.to_dict())}
    # Each byte at a word's end and within, and merges.
    tokenizers: Mapping[str, Any] = defaultdict(lambda: _Vocabulary(nano.VOCABULARY + BYTES + 2))
    with torch.device("meta"):
        autoencoder = module.build_autoencoder(SIDE)
        channels = getattr(autoencoder.config, "latent_channels", None) or autoencoder.config.z_dim
        models = module.build_models(preset, tokenizers, SIDE, channels)
    return {name: _part(model) for name, model in {**models, "vae": autoencoder}.items()}


def _part(model: Any) -> Part:
    library = type(model).__module__.partition(".")[0]
    config = model.config.to_dict() if library == "transformers" else dict(model.config)
    return Part(library, type(model).__name__, config)
