"""Parts of the small models that families build from a seed, without their weights."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from zerotrain.config.families import LANGUAGE_MODELS
from zerotrain.launch.planner.part import Part
from zerotrain.models.families import language_nano, nano
from zerotrain.models.families.small_pipeline import SmallSpec, latent_channels

SIDE = 256
"""Default side in pixels: it changes no parameter, only SD3's positions."""
BYTES = 256


class _Vocabulary:
    """Tokenizer with the largest vocabulary of a small model."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def nano_parts(family: str, preset: str, side: int = SIDE) -> dict[str, Part]:
    """Return the models of a family's preset, with the largest text vocabulary.

    Args:
        family: A family with a module `<family>_nano`.
        preset: `nano` or `micro`.
        side: Side in pixels of the images for which it is built. SD3's transformer does not support
            larger ones.
    """
    small = importlib.import_module(f"zerotrain.models.families.{family}_nano").SMALL
    if family in LANGUAGE_MODELS:
        values = small.config(_Vocabulary(language_nano.VOCABULARY), preset)
        return {"model": Part("transformers", small.model.__name__, values.to_dict())}
    # Each byte at the end of a word and within one, and merges.
    tokenizers: Mapping[str, Any] = defaultdict(lambda: _Vocabulary(nano.VOCABULARY + BYTES + 2))
    with torch.device("meta"):
        autoencoder = small.build_autoencoder(side)
        channels = latent_channels(autoencoder)
        models = small.build_models(SmallSpec(preset, small.pipeline, tokenizers, side, channels))
    return {name: _part(model) for name, model in {**models, "vae": autoencoder}.items()}


def _part(model: Any) -> Part:
    library = type(model).__module__.partition(".")[0]
    config = model.config.to_dict() if library == "transformers" else dict(model.config)
    return Part(library, type(model).__name__, config)
