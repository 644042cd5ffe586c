"""Model families: what the pipeline needs to know about a kind of model, one module per family.

The stages and the training loop know only the types below and `DiffusionFamily` and
`LanguageFamily`. A family has a line in config.families.FAMILIES, and a module of that name here
with `FAMILY`, an instance of a subclass of one of them (docs/families.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from zerotrain.config.families import FAMILIES
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    import torch

    from zerotrain.models.families.diffusion import DiffusionFamily
    from zerotrain.models.families.language import LanguageFamily

Batch: TypeAlias = "dict[str, torch.Tensor]"
"""The input of one forward pass in training: tensors by name, of B samples, on the device.

For images: `latents` float32 [B, C, h, w], scaled as the denoiser expects them; the tensors of
Encoders.encode_prompts, each with leading dimension B, and if prompts differ in length padded with
zeros, with `<name>_mask` bool [B, T]; `original_size`, `crop_top_left` and `target_size` int64
[B, 2] (height and width of the image file, top and left of the crop, height and width after crop
and resize); `noise` float32 of the latents' shape, standard normal; `uniform` float64 [B] in
[0, 1), from which the family derives the timestep; with train.tread_config `route` int64
[B, routes, tokens], the order of the image tokens, kept ones first. If samples have n conditioning
images, also the tensors of Encoders.encode_conditioning, usually `conditioning_latents` float32
[B, n, C, h, w]: the model reads them, and the loss is over `latents` only.

For text, int64, with T the longest row of the batch: `input_ids` [B, T]; `labels` [B, T], for a
seq2seq model as long as its longest answer, -100 where nothing is learned; `attention_mask`
[B, T], 0 for padding. Packed rows have `position_ids` [B, T] instead, which restart at 0 with each
example.
"""


@dataclass(frozen=True)
class Tokens:
    """A tokenised conversation that a language model learns."""

    input_ids: list[int]
    labels: list[int]
    """-100 where nothing is learned. For a causal model as long as input_ids."""
    left_out: int = 0
    """Answers that the tokenizer's chat template does not render as they were generated."""


class Encoders(Protocol):
    """The parts of a model that the cache stage loads, and training does not."""

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode float32 [B, 3, H, W] in [-1, 1] to latents float32 [B, C, h, w]: the mode."""

    def encode_prompts(
        self, prompts: Sequence[str]
    ) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
        """Encode B prompts to float32 tensors, by name.

        Each is one tensor with leading dimension B, or B tensors that differ in the first.
        """


class ConditionedEncoders(Encoders, Protocol):
    """Encoders of a base that reads conditioning images.

    Each sample has n of them, cropped to squares and scaled to the resolution of the images.
    """

    def encode_conditioning(self, pixels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Encode float32 [B, n, 3, H, W] in [-1, 1] to float32 tensors, by name in the batch.

        Their leading dimension is B; usually they are `conditioning_latents` [B, n, C, h, w].
        """

    def encode_prompts(
        self, prompts: Sequence[str], conditioning: torch.Tensor | None = None
    ) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
        """Encode prompts, together with their conditioning images if the text encoder sees them.

        `conditioning` is float32 [B, n, 3, H, W] in [-1, 1], and given if Conditioning.in_prompt.
        """


class Objective(Protocol):
    """A training objective."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the loss of each sample, float32 [B]."""


Family: TypeAlias = "DiffusionFamily | LanguageFamily"
"""A family of either modality."""


def load_family(name: str) -> Family:
    """Import the family with this name.

    Raises:
        PipelineError: there is no such family.
    """
    if name not in FAMILIES:
        raise PipelineError(
            f"family: {name!r} is not known", hint=known_names(name, FAMILIES, "families")
        )
    family: Any = importlib.import_module(f"zerotrain.models.families.{name}").FAMILY
    return family  # type: ignore[no-any-return]
