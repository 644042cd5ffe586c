"""The SD3 family: a transformer over VAE latents, trained by flow matching.

Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis" (2024),
https://arxiv.org/abs/2403.03206: two CLIP text encoders, and a T5 that a base may lack. Training
follows diffusers' examples/dreambooth/train_dreambooth_sd3.py, without preconditioning of outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from zerotrain.config.families import FAMILIES
from zerotrain.models.families.objectives import FlowMatchingObjective
from zerotrain.models.families.patches import JointTransformerFamily, check_patches, check_positions
from zerotrain.models.families.pipelines import PipelineEncoders, latents_of, prompt_length
from zerotrain.models.families.small_models import (
    PIXELS_PER_LATENT,
    Arguments,
    SmallPipeline,
    SmallSpec,
    clip,
    t5,
)
from zerotrain.models.families.token_routing import routing
from zerotrain.models.pretrained import read_config

if TYPE_CHECKING:
    from zerotrain.models.families import Batch


class Sd3Encoders(PipelineEncoders):
    """VAE and text encoders of a base model."""

    def __init__(
        self, base: Path, device: str, max_sequence_length: int | None, dtype: torch.dtype
    ) -> None:
        super().__init__("StableDiffusion3Pipeline", base, device, dtype)
        pipeline = self.pipeline
        self.length = prompt_length(pipeline, pipeline.tokenizer_3, max_sequence_length, 512)
        self._transformer = read_config(base / "transformer" / "config.json")
        if pipeline.text_encoder_3 is None:
            # Zeros replace its embeddings; their width comes from the transformer's config.
            pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**self._transformer))

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels [B, 3, H, W] in [-1, 1] to the posterior's mode, scaled [B, C, h, w].

        Raises:
            PipelineError: the transformer has no patches or positions for images of this size.
        """
        latents = latents_of(self.vae, pixels)
        check_patches(latents, pixels, self._transformer["patch_size"])
        check_positions(latents, self._transformer)
        return latents

    @torch.inference_mode()
    def encode_prompts(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encode B prompts to `prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P].

        T are CLIP's tokens and then T5's, which are zeros if the base has no T5.
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

    def __init__(
        self,
        scheduler: FlowMatchEulerDiscreteScheduler,
        settings: Mapping[str, Any] | None,
        transformer: Mapping[str, Any],
    ) -> None:
        super().__init__(scheduler, settings, FAMILIES["sd3"].weighting_scheme)
        self._transformer = transformer

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents, both [B, C, h, w], at timesteps [B] in (0, T].

        Raises:
            PipelineError: the base has no positions for latents of this size.
        """
        check_positions(noisy, self._transformer)  # another base may have filled the cache
        dtype = next(model.parameters()).dtype
        velocity: torch.Tensor = model(
            hidden_states=noisy.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            pooled_projections=batch["pooled_prompt_embeds"].to(dtype),
            joint_attention_kwargs=routing(batch),
            return_dict=False,
        )[0]
        return velocity

    def image_tokens(self, latents: torch.Tensor) -> int:
        """Return the number of patches of latents [B, C, h, w]."""
        height, width = latents.shape[-2:]
        patch: int = self._transformer["patch_size"]
        return (height // patch) * (width // patch)


HEADS, HEAD_WIDTH = {"nano": 4, "micro": 10}, 32
LAYERS = {"nano": 4, "micro": 6}
"""The small transformers have 2.3 and 21.5 million parameters."""


def small_parts(spec: SmallSpec) -> dict[str, Arguments]:
    """Return the arguments of a small model's parts, for squares or images of a longest side."""
    return {
        **dict.fromkeys(
            ("text_encoder", "text_encoder_2"), clip(spec.tokenizers["tokenizer"], spec.width)
        ),
        "text_encoder_3": t5(spec.tokenizers["tokenizer_3"], spec.width),
        "transformer": {
            "sample_size": spec.side // PIXELS_PER_LATENT,
            "patch_size": 1,
            "in_channels": spec.channels,
            "out_channels": spec.channels,
            "num_layers": LAYERS[spec.preset],
            "num_attention_heads": HEADS[spec.preset],
            "attention_head_dim": HEAD_WIDTH,
            "joint_attention_dim": 2 * spec.width,
            "caption_projection_dim": HEADS[spec.preset] * HEAD_WIDTH,
            "pooled_projection_dim": 2 * spec.width,
            # SD3 has positions for images three times as large, a third of a step apart, with which
            # so small a model learns slowly.
            "pos_embed_max_size": (spec.longest or spec.side) // PIXELS_PER_LATENT,
        },
    }


class Sd3(JointTransformerFamily):
    """The family of Stable Diffusion 3."""

    small = SmallPipeline(
        tokenizers={"tokenizer": "clip", "tokenizer_2": "clip", "tokenizer_3": "t5"},
        parts=small_parts,
        scheduler="FlowMatchEulerDiscreteScheduler",
    )

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Sd3Encoders:
        """Load VAE and text encoders; the transformer stays on disk."""
        return Sd3Encoders(base, device, max_sequence_length, dtype)

    def flow_objective(
        self,
        scheduler: FlowMatchEulerDiscreteScheduler,
        settings: Mapping[str, Any] | None,
        config: Mapping[str, Any],
    ) -> Sd3Objective:
        """Build the objective for a scheduler and the transformer's config.json."""
        return Sd3Objective(scheduler, settings, config)


FAMILY = Sd3(FAMILIES["sd3"])
