"""FluxPipeline with conditioning images, for bases of every kind of Flux.

One loop samples for FLUX.1, Kontext, Fill and in-context LoRAs: training and sampling extend the
transformer's input with the same function. diffusers' own pipelines scale images themselves;
FluxKontextPipeline takes one image, and FluxFillPipeline samples from the posterior.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerotrain.config.families import FAMILIES
from zerotrain.models.families.conditioned_sampling import extended_input
from zerotrain.models.families.conditioning import takes_control
from zerotrain.models.families.flux_conditioning import Redux, add_conditioning
from zerotrain.models.families.pipelines import pipeline_class

FluxPipeline: Any = pipeline_class("FluxPipeline")


class ConditionedFluxPipeline(FluxPipeline):  # type: ignore[misc]
    """FluxPipeline that takes `conditioning`: the result of FluxEncoders.encode_conditioning."""

    redux: Redux | None = None
    """The image encoders, if the model is FLUX.1 Redux."""

    @classmethod
    def around(cls, pipeline: Any) -> ConditionedFluxPipeline:
        """Build a pipeline around the parts of another pipeline of Flux."""
        if isinstance(pipeline, cls):
            return pipeline
        made = cls(**pipeline.components)
        made.set_progress_bar_config(**pipeline._progress_bar_config)
        return made

    @functools.wraps(FluxPipeline.__call__)
    def __call__(
        self, *values: Any, conditioning: Mapping[str, torch.Tensor] | None = None, **named: Any
    ) -> Any:
        control = takes_control(self.transformer.config)

        def extend(given: Mapping[str, Any]) -> dict[str, Any]:
            patches, places = add_conditioning(
                given["hidden_states"], given["img_ids"], conditioning or {}, control=control
            )
            return {"hidden_states": patches, "img_ids": places}

        with extended_input(self.transformer, extend):
            return super().__call__(*values, **named)

    def prepare_latents(
        self, batch_size: int, num_channels_latents: int, *values: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw noise with the channels of the transformer's output: its input may have more."""
        channels = FAMILIES["flux"].latent_channels(self.transformer.config)
        found: tuple[torch.Tensor, torch.Tensor] = super().prepare_latents(
            batch_size, channels, *values
        )
        return found

    @torch.no_grad()
    def encode_redux(
        self, prompts: Sequence[str], pixels: torch.Tensor, length: int
    ) -> dict[str, torch.Tensor]:
        """Encode B prompts of `length` tokens as in training.

        Each has an image: `pixels` is [B, 1, 3, H, W] in [-1, 1].
        """
        assert self.redux is not None
        embeds, pooled, _ = self.encode_prompt(list(prompts), max_sequence_length=length)
        return self.redux.append(prompts, embeds, pooled, pixels)

    @torch.no_grad()
    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode float32 [B, 3, H, W] in [-1, 1] to the posterior's mode, scaled as in training.

        The autoencoder computes in its own type; the result is float32.
        """
        vae = self.vae
        posterior = vae.encode(pixels.to(self._execution_device, vae.dtype)).latent_dist
        shift, scale = vae.config.shift_factor or 0.0, vae.config.scaling_factor
        scaled: torch.Tensor = (posterior.mode() - shift) * scale
        return scaled.float()
