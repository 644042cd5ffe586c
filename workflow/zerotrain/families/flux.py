"""The Flux family: a transformer over packed latents, conditioned on CLIP's pooled text and on T5.

Black Forest Labs, "FLUX.1" (2024), https://github.com/black-forest-labs/flux; trained by flow
matching as in diffusers' examples/dreambooth/train_dreambooth_flux.py. `dev` is distilled to take
the guidance as a number, `schnell` is told none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.families.flow_matching import read_flow_scheduler
from zerotrain.families.patches import (
    PackedFamily,
    PackedObjective,
    pack,
    refuse_odd,
    unpack,
)
from zerotrain.families.pipelines import PipelineEncoders, latents_of, prompt_length

if TYPE_CHECKING:
    from zerotrain.config import EvaluateConfig
    from zerotrain.families import Batch


class FluxEncoders(PipelineEncoders):
    """VAE and text encoders of a base model."""

    def __init__(
        self, base: Path, device: str, max_sequence_length: int | None, dtype: torch.dtype
    ) -> None:
        super().__init__("FluxPipeline", base, device, dtype)
        pipeline = self.pipeline
        self.length = prompt_length(pipeline, pipeline.tokenizer_2, max_sequence_length, 512)

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] to scaled latents [B, C, h, w]: the posterior's mode."""
        latents = latents_of(self.vae, pixels)
        refuse_odd(latents, pixels)
        return latents

    @torch.inference_mode()
    def encode_prompts(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """B prompts to T5's `prompt_embeds` [B, T, D] and CLIP's `pooled_prompt_embeds` [B, P]."""
        embeds, pooled, _ = self.prompt_pipeline.encode_prompt(
            list(prompts), max_sequence_length=self.length
        )
        return {
            "prompt_embeds": embeds.float().cpu(),
            "pooled_prompt_embeds": pooled.float().cpu(),
        }


class FluxObjective(PackedObjective):
    """Flow matching of a transformer that takes patches and their places.

    Args:
        guidance: What a distilled model is told; None for a model that takes no guidance.
    """

    def __init__(self, *arguments: Any, guidance: float | None) -> None:
        super().__init__(*arguments)
        self._guidance = guidance

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """The velocity [B, C, h, w] for noisy latents [B, C, h, w] at timesteps [B]."""
        dtype, device = next(model.parameters()).dtype, noisy.device
        embeds = batch["prompt_embeds"].to(dtype)
        guidance = None
        if self._guidance is not None:
            guidance = torch.full((len(noisy),), self._guidance, device=device)
        velocity: torch.Tensor = model(
            hidden_states=pack(noisy).to(dtype),
            timestep=timesteps / 1000,
            guidance=guidance,
            pooled_projections=batch["pooled_prompt_embeds"].to(dtype),
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=device, dtype=dtype),
            img_ids=_places(noisy).to(device, dtype),
            return_dict=False,
        )[0]
        return unpack(velocity, noisy.shape)


def _places(latents: torch.Tensor) -> torch.Tensor:
    """Of each patch of latents [B, C, h, w], in pack's order: 0, row and column, [h/2 * w/2, 3]."""
    rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
    axes = [torch.arange(length) for length in (1, rows, columns)]
    return torch.cartesian_prod(*axes)


class Flux(PackedFamily):
    """The family's parts and acts; see zerotrain.families.Family."""

    name = "flux"
    text_parts = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    parts = ("scheduler", *text_parts, "transformer", "vae")
    encoding_code = ("zerotrain.families.flux:FluxEncoders", "zerotrain.families.pipelines")
    trained_part = "transformer"
    classes: Mapping[str, str] = {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
    }
    pipeline = "FluxPipeline"

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> FluxEncoders:
        """Load VAE and text encoders; the transformer stays on disk."""
        return FluxEncoders(base, device, max_sequence_length, dtype)

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> FluxObjective:
        """The objective that the base's noise scheduler describes."""
        config = json.loads((base / self.trained_part / "config.json").read_text())
        given = dict(settings or {})
        told = given.pop("flux_guidance_value", 1.0)
        return FluxObjective(
            read_flow_scheduler(base / "scheduler"),
            given or None,
            guidance=told if config.get("guidance_embeds") else None,
        )

    def sampling_arguments(
        self, pipeline: Any, config: EvaluateConfig, max_sequence_length: int | None
    ) -> dict[str, Any]:
        """A distilled model is told the guidance; another is guided away from the empty prompt."""
        length = prompt_length(pipeline, pipeline.tokenizer_2, max_sequence_length, 512)
        found: dict[str, Any] = {"max_sequence_length": length}
        scale = config.guidance_scale
        if pipeline.transformer.config.guidance_embeds:
            found |= super().sampling_arguments(pipeline, config, max_sequence_length)
        elif scale is not None and scale > 1:
            found |= {"true_cfg_scale": scale, "negative_prompt": ""}
        return found


FAMILY = Flux()
