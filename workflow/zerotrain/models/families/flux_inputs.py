"""The input of Flux's transformer, in training and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerotrain.config.families import FAMILIES
from zerotrain.models.families.flux_conditioning import FILL, LATENTS
from zerotrain.models.families.patches import pack


def takes_fill(config: Mapping[str, Any]) -> bool:
    """Return whether a transformer takes a masked image and its mask next to noisy latents."""
    taken: int = config["in_channels"]
    return 4 * FAMILIES["flux"].latent_channels(config) < taken and not takes_control(config)


def takes_control(config: Mapping[str, Any]) -> bool:
    """Return whether a transformer takes a masked image, a mask and a control image, as FLEX.2."""
    taken: int = config["in_channels"]
    return taken == 4 * (3 * FAMILIES["flux"].latent_channels(config) + 1)


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
