"""Base classes of families with a transformer over latents, most often over 2 x 2 patches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from zerotrain.errors import PipelineError
from zerotrain.models.families.diffusion import DiffusionFamily
from zerotrain.models.families.objectives import FlowMatchingObjective, read_flow_scheduler
from zerotrain.models.families.pipelines import prompt_length
from zerotrain.models.pretrained import read_config

if TYPE_CHECKING:
    from zerotrain.config.models import EvaluateConfig


Grid = tuple[int, int, int]
"""Frames, rows and columns of an image's patches; the transformer derives positions from them."""


class JointTransformerFamily(DiffusionFamily):
    """A family whose transformer attends to the tokens of image and text together.

    It is trained by flow matching.
    """

    @abstractmethod
    def flow_objective(
        self,
        scheduler: FlowMatchEulerDiscreteScheduler,
        settings: Mapping[str, Any] | None,
        config: Mapping[str, Any],
    ) -> FlowMatchingObjective:
        """Build the objective for a scheduler and the transformer's config.json."""

    def objective(
        self, base: Path, settings: Mapping[str, Any] | None = None
    ) -> FlowMatchingObjective:
        """Build the objective with the schedule of the base's scheduler."""
        config = read_config(base / self.trained_part / "config.json")
        return self.flow_objective(read_flow_scheduler(base / "scheduler"), settings, config)

    def shape_objective(self, config: Mapping[str, Any]) -> FlowMatchingObjective:
        """Build the objective with a schedule that predictions do not depend on."""
        return self.flow_objective(FlowMatchEulerDiscreteScheduler(), None, config)

    def prompt_length(self, pipeline: Any, max_sequence_length: int | None) -> int:
        """Return the length that a prompt is cut or padded to; see pipelines.prompt_length."""
        assert self.spec.prompt is not None
        tokenizer = getattr(pipeline, self.spec.prompt.tokenizer)
        return prompt_length(pipeline, tokenizer, max_sequence_length, self.spec.prompt.most)

    def read_tokens(self, pipeline: Any, tokenizer: str, max_sequence_length: int | None) -> int:
        """Return the length of prompts; an encoder with another tokenizer has a fixed one."""
        if self.spec.prompt is None or tokenizer != self.spec.prompt.tokenizer:
            return super().read_tokens(pipeline, tokenizer, max_sequence_length)
        return self.prompt_length(pipeline, max_sequence_length)

    def sampling_arguments(
        self, pipeline: Any, config: EvaluateConfig, max_sequence_length: int | None
    ) -> dict[str, Any]:
        """Return arguments that give prompts as many tokens as the captions in training."""
        return {
            **super().sampling_arguments(pipeline, config, max_sequence_length),
            "max_sequence_length": self.prompt_length(pipeline, max_sequence_length),
        }


class PackedFamily(JointTransformerFamily):
    """A family whose transformer takes 2 x 2 patches as channels."""

    def unpacked(self, latents: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Unpack patches [B, h/2 * w/2, 4C] to latents [B, C, h, w]; `shape` is C, h and w."""
        return unpack(latents, torch.Size((len(latents), *shape)))


class PackedObjective(FlowMatchingObjective):
    """Flow matching of a transformer over 2 x 2 patches."""

    def image_tokens(self, latents: torch.Tensor) -> int:
        """Return the number of 2 x 2 patches of latents [B, C, h, w]."""
        return latents.shape[-2] * latents.shape[-1] // 4


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Pack latents [B, C, h, w] to patches [B, h/2 * w/2, 4C], row by row.

    Within a patch the channel varies slowest, as in the pipelines' _pack_latents.
    """
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 4 * channels)


def unpack(patches: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Invert pack, to latents of this shape [B, C, h, w]."""
    batch, channels, height, width = shape
    latents = patches.view(batch, height // 2, width // 2, channels, 2, 2)
    return latents.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def append_conditioning(
    patches: torch.Tensor, grid: Grid, conditioning: torch.Tensor | None
) -> tuple[torch.Tensor, list[list[Grid]]]:
    """Append the patches of conditioning latents to those of noisy ones.

    Args:
        patches: [B, T, 4C].
        grid: Grid of these patches.
        conditioning: Latents [B, n, C, h, w]; None for none.

    Returns:
        The patches [B, T + n * h/2 * w/2, 4C], and the grids of each sample's images.
    """
    if conditioning is None:
        return patches, [[grid]] * len(patches)
    count, height, width = conditioning.shape[1], *conditioning.shape[-2:]
    further = [pack(one).to(patches) for one in conditioning.unbind(1)]
    grids = [grid, *[(1, height // 2, width // 2)] * count]
    return torch.cat([patches, *further], dim=1), [grids] * len(patches)


def check_patches(latents: torch.Tensor, pixels: torch.Tensor, patch: int = 2) -> None:
    """Check that patches of this side cover latents [B, C, h, w].

    Raises:
        PipelineError: they do not; it names the resolution of the pixels [B, 3, H, W].
    """
    for side, length in zip(latents.shape[-2:], pixels.shape[-2:], strict=True):
        if side % patch:
            multiple = patch * (length // side)
            raise PipelineError(
                f"train.resolution: {length} pixels are {side} latents wide, which patches of "
                f"{patch} x {patch} do not cover",
                hint=f"set it, or with buckets data.aspect_buckets.alignment, to a multiple of "
                f"{multiple}",
            )


def check_positions(latents: torch.Tensor, transformer: Mapping[str, Any]) -> None:
    """Check that the transformer's config.json has positions for latents [B, C, h, w].

    Raises:
        PipelineError: it has too few; the hint is how far to lower the resolution.
    """
    side = max(latents.shape[-2:]) // transformer["patch_size"]
    most = transformer["pos_embed_max_size"]
    if side > most:
        raise PipelineError(
            f"train.resolution: images of {side} patches a side, and the base has positions "
            f"for {most}",
            hint=f"lower it to at most {most / side:.0%} of what it is, or of longer images "
            "data.aspect_buckets.max_aspect",
        )
