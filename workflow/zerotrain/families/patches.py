"""Latents as transformers take them: a sequence of patches of 2 x 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.families.diffusion import DiffusionFamily
from zerotrain.families.flow_matching import FlowMatchingObjective


class PackedFamily(DiffusionFamily):
    """A family whose transformer takes patches of 2 x 2 as channels."""

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """A patch has four times as many."""
        return super().latent_channels(config) // 4

    def unpacked(self, latents: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Patches [B, h/2 * w/2, 4C] as latents [B, C, h, w]; `shape` is C, h and w."""
        return unpack(latents, torch.Size((len(latents), *shape)))


class PackedObjective(FlowMatchingObjective):
    """Flow matching of such a transformer."""

    def image_tokens(self, latents: torch.Tensor) -> int:
        """Patches of 2 x 2 of latents [B, C, h, w]."""
        return latents.shape[-2] * latents.shape[-1] // 4


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Latents [B, C, h, w] to patches [B, h/2 * w/2, 4C], row by row.

    Within a patch the channel changes last, as in the pipelines' _pack_latents.
    """
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 4 * channels)


def unpack(patches: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of pack, to latents of this shape [B, C, h, w]."""
    batch, channels, height, width = shape
    latents = patches.view(batch, height // 2, width // 2, channels, 2, 2)
    return latents.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def refuse_odd(latents: torch.Tensor, pixels: torch.Tensor, patch: int = 2) -> None:
    """Refuse latents [B, C, h, w] that no patches of this side cover.

    Raises:
        PipelineError: naming the resolution of the pixels [B, 3, H, W] and what divides it.
    """
    side, resolution = latents.shape[-1], pixels.shape[-1]
    if side % patch:
        multiple = patch * (resolution // side)
        raise PipelineError(
            f"train.resolution: {resolution} pixels are {side} latents wide, which patches of "
            f"{patch} x {patch} do not cover",
            hint=f"set it to a multiple of {multiple}",
        )


def refuse_large(latents: torch.Tensor, transformer: Mapping[str, Any]) -> None:
    """Refuse latents [B, C, h, w] for which the transformer's config.json has no positions.

    Raises:
        PipelineError: saying how far the resolution has to go down.
    """
    side = max(latents.shape[-2:]) // transformer["patch_size"]
    most = transformer["pos_embed_max_size"]
    if side > most:
        raise PipelineError(
            f"train.resolution: images of {side} patches a side, and the base has positions "
            f"for {most}",
            hint=f"lower it to at most {most / side:.0%} of what it is",
        )
