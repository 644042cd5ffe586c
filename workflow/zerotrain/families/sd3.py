"""The SD3 family: a transformer over VAE latents that flows from noise to an image.

Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis" (2024),
https://arxiv.org/abs/2403.03206: two CLIP text encoders, and a T5 that a base may lack. Training
follows diffusers' examples/dreambooth/train_dreambooth_sd3.py, without preconditioning of outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.families import FAMILIES
from zerotrain.families.diffusion import DiffusionFamily
from zerotrain.families.flow_matching import FlowMatchingObjective, read_flow_scheduler
from zerotrain.families.patches import refuse_large, refuse_odd
from zerotrain.families.pipelines import PipelineEncoders, latents_of, prompt_length

if TYPE_CHECKING:
    from zerotrain.config import EvaluateConfig
    from zerotrain.families import Batch


class Sd3Encoders(PipelineEncoders):
    """VAE and text encoders of a base model."""

    def __init__(
        self, base: Path, device: str, max_sequence_length: int | None, dtype: torch.dtype
    ) -> None:
        super().__init__("StableDiffusion3Pipeline", base, device, dtype)
        pipeline = self.pipeline
        self.length = prompt_length(pipeline, pipeline.tokenizer_3, max_sequence_length, 512)
        self._transformer = json.loads((base / "transformer" / "config.json").read_text())
        if pipeline.text_encoder_3 is None:
            # Zeros take its place, and the pipeline asks the transformer how wide they are.
            pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**self._transformer))

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] to scaled latents [B, C, h, w]: the posterior's mode.

        Raises:
            PipelineError: the transformer has no patches or positions for images of this size.
        """
        latents = latents_of(self.vae, pixels)
        refuse_odd(latents, pixels, self._transformer["patch_size"])
        refuse_large(latents, self._transformer)
        return latents

    @torch.inference_mode()
    def encode_prompts(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """B prompts to `prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P].

        T are CLIP's tokens and then those of T5, or zeros where the base has no T5.
        """
        embeds, _, pooled, _ = self.prompt_pipeline.encode_prompt(
            list(prompts),
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.length,
        )
        return {
            "prompt_embeds": embeds.float().cpu(),
            "pooled_prompt_embeds": pooled.float().cpu(),
        }


class Sd3Objective(FlowMatchingObjective):
    """Flow matching with SD3's transformer."""

    def __init__(self, base: Path, settings: Mapping[str, Any] | None) -> None:
        scheme = FAMILIES["sd3"].weighting_scheme
        super().__init__(read_flow_scheduler(base / "scheduler"), settings, scheme)
        self._transformer = json.loads((base / "transformer" / "config.json").read_text())

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """The velocity [B, C, h, w] for noisy latents [B, C, h, w] at timesteps [B] in (0, T].

        Raises:
            PipelineError: the base has no positions for latents as large.
        """
        refuse_large(noisy, self._transformer)  # another base may have filled the cache
        dtype = next(model.parameters()).dtype
        velocity: torch.Tensor = model(
            hidden_states=noisy.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            pooled_projections=batch["pooled_prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]
        return velocity

    def image_tokens(self, latents: torch.Tensor) -> int:
        """Patches of latents [B, C, h, w]."""
        height, width = latents.shape[-2:]
        patch: int = self._transformer["patch_size"]
        return (height // patch) * (width // patch)


class Sd3(DiffusionFamily):
    """The family's parts and acts; see zerotrain.families.Family."""

    name = "sd3"
    optional_parts = ("text_encoder_3", "tokenizer_3")
    text_parts = (
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
        "tokenizer",
        "tokenizer_2",
        "tokenizer_3",
    )
    parts = ("scheduler", *text_parts, "transformer", "vae")
    encoding_code = ("zerotrain.families.sd3:Sd3Encoders", "zerotrain.families.pipelines")
    trained_part = "transformer"
    classes: Mapping[str, str] = {
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
        "transformer": "SD3Transformer2DModel",
        "vae": "AutoencoderKL",
    }
    pipeline = "StableDiffusion3Pipeline"

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Sd3Encoders:
        """Load VAE and text encoders; the transformer stays on disk."""
        return Sd3Encoders(base, device, max_sequence_length, dtype)

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> Sd3Objective:
        """Flow matching along the schedule of the base's scheduler."""
        return Sd3Objective(base, settings)

    def sampling_arguments(
        self, pipeline: Any, config: EvaluateConfig, max_sequence_length: int | None
    ) -> dict[str, Any]:
        """Prompts have as many tokens as the captions of the training."""
        length = prompt_length(pipeline, pipeline.tokenizer_3, max_sequence_length, 512)
        return {
            **super().sampling_arguments(pipeline, config, max_sequence_length),
            "max_sequence_length": length,
        }


FAMILY = Sd3()
