"""Flux's input from conditioning images: their latents, or a masked image with its mask.

FLUX.1 Kontext and an in-context LoRA read latents as further tokens. FLUX.1 Fill reads, with each
noisy latent, the latent of the masked image and the mask's pixels. FLUX.1 Redux reads tokens of an
image that follow those of the text. Training and sampling extend the input with the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from zerotrain.models.families.patches import pack
from zerotrain.models.families.pipelines import pipeline_class
from zerotrain.models.pretrained import from_pretrained

if TYPE_CHECKING:
    from zerotrain.models.families import Encoders


LATENTS, FILL = "conditioning_latents", "fill_condition"
"""Names of the tensors that enter a batch."""
FILL_PIPELINE = "FluxFillPipeline"


def encode_conditioning(
    encode_images: Callable[[torch.Tensor], torch.Tensor], pixels: torch.Tensor, *, fill: bool
) -> dict[str, torch.Tensor]:
    """Encode the conditioning images of B samples.

    Args:
        encode_images: Encodes float32 [B, 3, H, W] in [-1, 1] to scaled latents [B, C, h, w].
        pixels: Float32 [B, n, 3, H, W] in [-1, 1]; with `fill` n is 2, an image and its mask.
        fill: Whether the base is FLUX.1 Fill.

    Returns:
        `conditioning_latents` float32 [B, n, C, h, w]; with `fill` `fill_condition` float32
        [B, C + f * f, h, w], where f is a latent's side in pixels.
    """
    if fill:
        image, mask = pixels.unbind(1)
        return {FILL: _fill_condition(encode_images, image, mask)}
    return {LATENTS: torch.stack([encode_images(image) for image in pixels.unbind(1)], dim=1)}


def _fill_condition(
    encode_images: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Prepare Fill's input as in diffusers' FluxFillPipeline (prepare_mask_latents).

    Latents are the posterior's mode; pixels under the white of the mask become 0, which is grey.
    """
    filled = (_luminance(mask) >= 0.5).float()
    latents = encode_images(image * (1 - filled))
    cells = torch.nn.functional.pixel_unshuffle(filled, image.shape[-1] // latents.shape[-1])
    return torch.cat([latents, cells.to(latents.device)], dim=1)


def _luminance(pixels: torch.Tensor) -> torch.Tensor:
    """Convert pixels [B, 3, H, W] in [-1, 1] to grey [B, 1, H, W] in [0, 1], rounded as in Pillow.

    Source: Pillow's src/libImaging/Convert.c, L24.
    """
    red, green, blue = ((pixels + 1) * 127.5).round().long().unbind(1)
    grey = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16
    return (grey / 255)[:, None]


def add_conditioning(
    patches: torch.Tensor,
    places: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    *,
    control: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add encoded conditioning images to the transformer's input.

    Tokens of conditioning images follow those of the image, and have 1 in the first axis of their
    positions; with several images, all have it, each with rows and columns from 0. One image is
    handled as in diffusers' FluxKontextPipeline, several as in DiffSynth-Studio
    (FluxImageUnit_Kontext): their order has no effect.

    Args:
        patches: Packed noisy latents [B, T, 4C].
        places: Image, row and column of each patch, [T, 3].
        tensors: Tensors that may include those of `encode_conditioning`.
        control: Whether the transformer takes a masked image, its mask and a control image. It
            gets zeros for both images and a mask of ones, so that everything is generated, as in
            DiffSynth-Studio by default (FluxImageUnit_Flex).

    Returns:
        Patches [B, T', 4C'] and places [T', 3]; the first T tokens are those of the image.
    """
    if (latents := tensors.get(LATENTS)) is not None:
        batch, count = latents.shape[:2]
        tokens = pack(latents.flatten(0, 1)).reshape(batch, -1, patches.shape[-1])
        own = image_places(latents, image=1).repeat(count, 1)
        patches = torch.cat([patches, tokens.to(patches)], dim=1)
        places = torch.cat([places, own.to(places)])
    if (condition := tensors.get(FILL)) is not None:
        patches = torch.cat([patches, pack(condition).to(patches)], dim=2)
    if control:
        no_image, all_drawn = torch.zeros_like(patches), torch.ones_like(patches[..., :4])
        patches = torch.cat([patches, no_image, all_drawn, no_image], dim=2)
    return patches, places


def image_places(latents: torch.Tensor, *, image: int = 0) -> torch.Tensor:
    """Return image, row and column, [h/2 * w/2, 3], of the patches of latents in pack's order."""
    rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
    axes = [torch.tensor([image]), torch.arange(rows), torch.arange(columns)]
    return torch.cartesian_prod(*axes)


class Redux:
    """SigLIP and the image embedder of a base or weights folder, both frozen.

    They turn an image into tokens of T5's width, which the transformer reads as text. Source:
    diffusers' FluxPriorReduxPipeline. For an empty text, T5's tokens and CLIP's vector are zeros,
    as in that pipeline without text encoders, and in DiffSynth-Studio, which reads no captions
    (FluxImageUnit_ReduxPromptEmbedder).

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
