"""Forward pass and loss of one micro batch, with the tensor shapes of training.

Images are predicted by the family's own objective. Values do not matter here, so they are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import Architecture
from zerotrain.launch.planner.shape import Shape, pixels_per_latent, prompt_shapes, text_tokens
from zerotrain.models.families import Batch, load_family

Loss = Callable[[], torch.Tensor]
"""Function that runs the model once and returns the scalar loss."""


class Forward:
    """The forward pass of an architecture's trained part. Build it outside of FakeTensorMode.

    Args:
        architecture: The architecture.
    """

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._family: Any = load_family(architecture.family)
        self._objective: Any = None
        if self._family.modality == "image":
            self._objective = self._family.shape_objective(architecture.trained.config)

    def loss_of(self, model: torch.nn.Module, shape: Shape) -> Loss:
        """Return the function of the training loss of one micro batch.

        Args:
            model: The trained part, on CPU (real or fake).
            shape: Size of the micro batch.

        Raises:
            PipelineError: the resolution is not a multiple of the model's patch size in pixels, or
                exceeds its positions.
        """
        if self._objective is None:
            return self._loss_of_text(model, shape)
        side = self._latent_side(shape)
        channels = self._family.spec.latent_channels(self._architecture.trained.config)
        noisy = torch.zeros(shape.batch, channels, side, side)
        target, timesteps = torch.zeros_like(noisy), torch.zeros(shape.batch)
        batch = self._batch(noisy, shape)

        def loss() -> torch.Tensor:
            prediction: torch.Tensor = self._objective.predict(model, noisy, timesteps, batch)
            each = (prediction.float() - target).square().mean(dim=(1, 2, 3))
            return each.mean()

        return loss

    def _loss_of_text(self, model: torch.nn.Module, shape: Shape) -> Loss:
        """Every token is learned: the objective's choice of tokens depends on values."""
        length = text_tokens(self._architecture, shape)
        tokens = torch.zeros(shape.batch, length, dtype=torch.int64)

        def loss() -> torch.Tensor:
            found: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            return found

        return loss

    def _batch(self, noisy: torch.Tensor, shape: Shape) -> Batch:
        shapes = prompt_shapes(self._architecture, shape)
        sizes = ("original_size", "crop_top_left", "target_size")
        return {
            **{name: torch.zeros(shape.batch, *size) for name, size in shapes.items()},
            **{name: torch.zeros(shape.batch, 2, dtype=torch.int64) for name in sizes},
            **self._family.shape_conditioning(
                self._architecture.trained.config, noisy, shape.conditioning_images
            ),
        }

    def _latent_side(self, shape: Shape) -> int:
        known, config = self._architecture, self._architecture.trained.config
        pixels, patch = pixels_per_latent(known), self._family.spec.patch
        patch = patch or config.get("patch_size") or 2 ** (len(config["block_out_channels"]) - 1)
        if shape.resolution % (pixels * patch):
            raise PipelineError(
                f"resolution {shape.resolution} is no multiple of {pixels * patch}, which "
                f"{known.source} divides images into",
                hint=f"choose a multiple of {pixels * patch}",
            )
        most = config.get("pos_embed_max_size", shape.resolution) * pixels * patch
        if shape.resolution > most:
            raise PipelineError(
                f"resolution {shape.resolution}: {known.source} has positions for images of up "
                f"to {most} px a side",
                hint=f"choose {most} or less (nano and micro are built for the first phase's "
                "images)",
            )
        return shape.resolution // pixels
