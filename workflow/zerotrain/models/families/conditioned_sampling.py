"""Sampling with conditioning images: the arguments of a pipeline that replace its prompts.

The images are cropped, scaled and encoded as in cache_latents, and the pipeline gets embeddings and
latents: its own scaling of images, which differs between pipelines, is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.data.buckets import centre_crop, crop_and_resize, to_pixels
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from PIL.Image import Image


class ConditionedSampling:
    """The hooks of a family whose pipelines take conditioning images."""

    name: str

    def conditioned_pipeline(self, pipeline: Any) -> Any:
        """Build the pipeline that takes conditioning images, around the same parts.

        A family overrides this if the base's own pipeline has no input for them, or takes no
        latents.
        """
        return pipeline

    def conditioned_arguments(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        pixels: torch.Tensor,
        *,
        negative: str | None,
        max_sequence_length: int | None,
    ) -> dict[str, Any]:
        """Build the pipeline's arguments that replace prompts and negative prompts.

        Args:
            pipeline: Pipeline from conditioned_pipeline.
            prompts: B prompts.
            pixels: Float32 [B, n, 3, H, W] in [-1, 1], on CPU: the conditioning images of each
                prompt, cropped and scaled to the resolution.
            negative: The negative prompt, with the same conditioning images; None without
                guidance.
            max_sequence_length: Tokens of a prompt; None for the family's default.

        Raises:
            PipelineError: the family has no input for conditioning images.
        """
        raise self._no_input()

    def encoded_conditioning(
        self, pipeline: Any, tensors: Mapping[str, torch.Tensor], resolution: int
    ) -> dict[str, Any]:
        """Build the pipeline's arguments for encoded conditioning images.

        Args:
            pipeline: Pipeline from conditioned_pipeline.
            tensors: Result of Encoders.encode_conditioning, with leading dimension B.
            resolution: Side of the images in pixels.

        Raises:
            PipelineError: the family has no input for conditioning images.
        """
        raise self._no_input()

    def _no_input(self) -> PipelineError:
        return PipelineError(
            f"family: {self.name} has no input for conditioning images",
            hint="choose a family with conditioning images, qwen_image or flux",
        )


@contextmanager
def extended_input(
    transformer: torch.nn.Module, extend: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Iterator[None]:
    """Make a transformer read further patches, and return only those of the images.

    Args:
        transformer: A transformer of diffusers that takes patches as `hidden_states` [B, T, D].
        extend: Returns the arguments to replace, by name, for those of a call.
    """
    tokens = 0

    def add(_: Any, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        nonlocal tokens
        tokens = named["hidden_states"].shape[1]
        return values, {**named, **extend(named)}

    def cut(_: Any, __: Any, answer: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (answer[0][:, :tokens],)

    handles = [
        transformer.register_forward_pre_hook(add, with_kwargs=True),
        transformer.register_forward_hook(cut),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def conditioning_pixels(
    conditioning: Sequence[Sequence[Image]], resolution: int
) -> list[torch.Tensor]:
    """Convert each prompt's conditioning images to float32 [n, 3, H, W], as in training.

    Args:
        conditioning: RGB images of any size.
        resolution: Side in pixels that the centre square of an image is scaled to.
    """
    return [
        torch.stack(
            [
                torch.from_numpy(
                    to_pixels(crop_and_resize(image, centre_crop(image.size), resolution))
                )
                for image in images
            ]
        )
        for images in conditioning
    ]
