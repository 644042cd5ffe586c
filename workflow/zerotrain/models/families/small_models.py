"""Small models of the real classes, as tables: the presets `nano` and `micro` of each family.

A family's module has its table, of which zerotrain.models.families.nano builds the model; the
classes are those of its FamilySpec. `micro` has the autoencoder of `nano`, wider text encoders and
a denoiser with ten times as many parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from zerotrain.config.families import FamilySpec

Arguments: TypeAlias = dict[str, Any]
"""Values of a class of diffusers, or of the configuration of one of transformers."""
MAX_TOKENS = 32
"""Of a caption."""
TEXT_WIDTH = {"nano": 64, "micro": 128}
"""Width of CLIP's embeddings, pooled and not; T5's are twice as wide."""
TEXT_INITIALIZER_FACTOR = 2.0
"""Larger than CLIP's 1, so that untrained encoders distinguish captions better. From about 5, the
attention saturates and they distinguish them less."""
PIXELS_PER_LATENT = 4
MAX_ROW = 512
"""Tokens of a row of text."""
WIDTH, LAYERS = {"nano": 64, "micro": 192}, {"nano": 2, "micro": 3}
"""Of language models."""


@dataclass(frozen=True)
class SmallSpec:
    """The properties that the models of a small pipeline are built for."""

    preset: str
    pipeline: str
    """Name of the pipeline's class in diffusers."""
    tokenizers: Mapping[str, Any]
    """Its tokenizers, by part."""
    side: int
    """Side of its square images in pixels."""
    channels: int
    """Channels of their latents."""
    longest: int | None = None
    """Longest side of its images, if some are no squares."""

    @property
    def width(self) -> int:
        """Width of the text embeddings."""
        return TEXT_WIDTH[self.preset]


@dataclass(frozen=True, kw_only=True)
class SmallPipeline:
    """The small models of a family of images."""

    tokenizers: Mapping[str, str]
    """Kind of each tokenizer, a key of nano.TOKENIZERS; parts of one kind share it."""
    parts: Callable[[SmallSpec], Mapping[str, Arguments]]
    """Returns the arguments of each model other than the autoencoder, in the order of building."""
    scheduler: str
    """Class of the noise scheduler."""
    schedule: Arguments = field(default_factory=dict)
    """Its arguments."""
    shifts: bool = True
    """Whether the autoencoder's config.json has the mean of its latents."""
    add_parts: Callable[[SmallSpec, Path], None] | None = None
    """Adds the parts that only the classes `extended` have to the saved folder."""
    extended: tuple[str, ...] = ()
    """Further classes of pipelines, which are saved as the family's own."""


@dataclass(frozen=True)
class SmallLanguageModel:
    """The small models of a family of text."""

    model: str
    """Class of the model in transformers."""
    arguments: Callable[[Any, str], Arguments]
    """Returns its configuration's values for a tokenizer and a preset."""


class ImageFamily(Protocol):
    """The part of a family of images that building a small model needs."""

    spec: FamilySpec
    small: SmallPipeline


class TextFamily(Protocol):
    """The part of a family of text that building a small model needs."""

    spec: FamilySpec
    small: SmallLanguageModel


def clip(tokenizer: Any, width: int, pooled_width: int | None = None) -> Arguments:
    """Return the arguments of a CLIP text encoder; the pooled width defaults to `width`."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "projection_dim": pooled_width or width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_factor": TEXT_INITIALIZER_FACTOR,
    }


def t5(tokenizer: Any, width: int) -> Arguments:
    """Return the arguments of a T5 encoder, as wide as two CLIP encoders of this width."""
    return {
        "vocab_size": len(tokenizer),
        "d_model": 2 * width,
        "d_kv": 32,
        "d_ff": 4 * width,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
    }
