"""Flux's input from conditioning images: their latents, or a masked image with its mask.

FLUX.1 Kontext and an in-context LoRA read latents as further tokens. FLUX.1 Fill reads, with each
noisy latent, the latent of the masked image and the mask's pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
