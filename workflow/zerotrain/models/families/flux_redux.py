"""FLUX.1 Redux: the tokens of a conditioning image follow those of the text.

SigLIP and an embedder, both frozen, turn the image into tokens of T5's width, which the transformer
reads as text. Source: diffusers' FluxPriorReduxPipeline. For an empty text, T5's tokens and CLIP's
vector are zeros, as in that pipeline without text encoders, and in DiffSynth-Studio
(FluxImageUnit_ReduxPromptEmbedder), which reads no captions at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from zerotrain.models.families.conditioning import (
    IMAGE_EMBEDDER,
    IMAGE_ENCODER,
    REDUX,
    read_pipeline,
)
from zerotrain.models.families.pipelines import pipeline_class
from zerotrain.models.pretrained import from_pretrained

if TYPE_CHECKING:
    from zerotrain.models.families import Encoders


class Redux:
    """SigLIP and the image embedder of a base or weights folder.

    Args:
        folder: The folder.
        device: Device to encode on.
        dtype: Type to encode in.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        from transformers import SiglipVisionModel  # slow to import

        encoder = from_pretrained(
            SiglipVisionModel, folder, subfolder=IMAGE_ENCODER, dtype=dtype, use_safetensors=True
        )
        embedder = from_pretrained(
            pipeline_class("ReduxImageEncoder"),
            folder,
            subfolder=IMAGE_EMBEDDER,
            dtype=dtype,
            use_safetensors=True,
        )
        self._encoder, self._embedder = encoder.to(device).eval(), embedder.to(device).eval()

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels [B, 3, H, W] in [-1, 1] of 8-bit images to tokens [B, N, D].

        The image is scaled to SigLIP's input size.
        """
        side = self._encoder.config.image_size
        levels = ((pixels.float() + 1) * 127.5).round().to(torch.uint8).movedim(1, -1)
        scaled = [
            Image.fromarray(one).resize((side, side), Image.Resampling.BICUBIC)
            for one in levels.cpu().numpy()
        ]
        seen = torch.from_numpy(np.stack([np.asarray(one) for one in scaled])).movedim(-1, 1)
        values = (seen / 127.5 - 1).to(self._encoder.device, self._encoder.dtype)
        states = self._encoder(values).last_hidden_state
        tokens: torch.Tensor = self._embedder(states).image_embeds
        return tokens

    def append(
        self,
        prompts: Sequence[str],
        embeds: torch.Tensor,
        pooled: torch.Tensor,
        pixels: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Append the tokens of images to the embeddings of their prompts.

        Args:
            prompts: B prompts.
            embeds: T5's embeddings [B, T, D].
            pooled: CLIP's pooled embeddings [B, P].
            pixels: Float32 [B, 1, 3, H, W] in [-1, 1].

        Returns:
            `prompt_embeds` [B, T + N, D] and `pooled_prompt_embeds` [B, P], in the types given.
        """
        text = torch.tensor([bool(prompt) for prompt in prompts], device=embeds.device)
        tokens = self.encode(pixels[:, 0]).to(embeds)
        return {
            "prompt_embeds": torch.cat([embeds.where(text[:, None, None], 0), tokens], dim=1),
            "pooled_prompt_embeds": pooled.where(text[:, None], 0),
        }


class ReduxEncoders:
    """Flux's encoders with those of an image, whose tokens follow the text's."""

    def __init__(self, encoders: Encoders, redux: Redux) -> None:
        self._encoders, self._redux = encoders, redux

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode images as Flux does."""
        return self._encoders.encode_images(pixels)

    def encode_prompts(
        self, prompts: Sequence[str], conditioning: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Encode B prompts, each with an image, pixels [B, 1, 3, H, W] in [-1, 1].

        The result is `prompt_embeds` [B, T + N, D] and `pooled_prompt_embeds` [B, P].
        """
        assert conditioning is not None  # ensured by check_conditioning
        text: Any = self._encoders.encode_prompts(prompts)
        return self._redux.append(
            prompts, text["prompt_embeds"], text["pooled_prompt_embeds"], conditioning
        )


def load_redux(folder: Path, device: str, dtype: torch.dtype) -> Redux | None:
    """Load the image encoders of FLUX.1 Redux; return None for a folder of another model."""
    return Redux(folder, device, dtype) if read_pipeline(folder) == REDUX else None
