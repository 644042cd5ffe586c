"""The Qwen-Image family: a transformer over packed latents, conditioned on Qwen2.5-VL's text.

Wu et al., "Qwen-Image Technical Report" (2025), https://arxiv.org/abs/2508.02324; trained by flow
matching as in diffusers' examples/dreambooth/train_dreambooth_lora_qwen_image.py. The autoencoder
is one of videos; an image is a single frame.
"""

from __future__ import annotations

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
from zerotrain.families.pipelines import PipelineEncoders, prompt_length

if TYPE_CHECKING:
    from zerotrain.config import EvaluateConfig
    from zerotrain.families import Batch

THETA = 10000
"""Base of the rotary frequencies (diffusers: QwenImageTransformer2DModel)."""


class QwenEncoders(PipelineEncoders):
    """VAE and text encoder of a base model."""

    def __init__(
        self, base: Path, device: str, max_sequence_length: int | None, dtype: torch.dtype
    ) -> None:
        super().__init__("QwenImagePipeline", base, device, dtype)
        pipeline = self.pipeline
        self.length = prompt_length(pipeline, pipeline.tokenizer, max_sequence_length, 1024)

    @torch.inference_mode()
    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] to scaled latents [B, C, h, w]: the posterior's mode.

        It is the inverse of what the pipeline does before it decodes.
        """
        vae = self.vae
        frames = pixels.to(vae.device).unsqueeze(2)
        latents: torch.Tensor = vae.encode(frames).latent_dist.mode().squeeze(2)
        refuse_odd(latents, pixels)
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        scaled: torch.Tensor = (latents - mean) / std
        return scaled.float().cpu()

    @torch.inference_mode()
    def encode_prompts(self, prompts: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """B prompts to `prompt_embeds`, B tensors [T, D] of as many tokens as each prompt has.

        Each is encoded alone, so that its numbers do not depend on the others' lengths.
        """
        pipeline = self.prompt_pipeline
        embeds = {
            prompt: pipeline.encode_prompt(prompt, max_sequence_length=self.length)[0][0]
            for prompt in dict.fromkeys(prompts)
        }
        return {"prompt_embeds": [embeds[prompt].float().cpu() for prompt in prompts]}


class QwenObjective(PackedObjective):
    """Flow matching of a transformer that takes patches, their grid and a text's mask."""

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """The velocity [B, C, h, w] for noisy latents [B, C, h, w] at timesteps [B]."""
        dtype = next(model.parameters()).dtype
        grid = (1, noisy.shape[-2] // 2, noisy.shape[-1] // 2)
        velocity: torch.Tensor = model(
            hidden_states=pack(noisy).to(dtype),
            timestep=timesteps / 1000,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            encoder_hidden_states_mask=batch.get("prompt_embeds_mask"),
            img_shapes=[[grid]] * len(noisy),
            return_dict=False,
        )[0]
        return unpack(velocity, noisy.shape)


class QwenImage(PackedFamily):
    """The family's parts and acts; see zerotrain.families.Family."""

    name = "qwen_image"
    parts = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
    text_parts = ("text_encoder", "tokenizer")
    encoding_code = ("zerotrain.families.qwen_image:QwenEncoders", "zerotrain.families.pipelines")
    trained_part = "transformer"
    classes: Mapping[str, str] = {
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
    }
    pipeline = "QwenImagePipeline"

    def empty_model(self, base: Path) -> torch.nn.Module:
        """The transformer that config.json describes, on the meta device but for its rotary
        frequencies, which no file holds."""
        model: Any = super().empty_model(base)
        axes = list(model.config.axes_dims_rope)
        model.pos_embed = type(model.pos_embed)(theta=THETA, axes_dim=axes, scale_rope=True)
        return model  # type: ignore[no-any-return]

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> QwenEncoders:
        """Load VAE and text encoder; the transformer stays on disk."""
        return QwenEncoders(base, device, max_sequence_length, dtype)

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> QwenObjective:
        """The objective that the base's noise scheduler describes."""
        return QwenObjective(read_flow_scheduler(base / "scheduler"), settings)

    def sampling_arguments(
        self, pipeline: Any, config: EvaluateConfig, max_sequence_length: int | None
    ) -> dict[str, Any]:
        """Guided away from the empty prompt."""
        length = prompt_length(pipeline, pipeline.tokenizer, max_sequence_length, 1024)
        found: dict[str, Any] = {"max_sequence_length": length}
        scale = config.guidance_scale
        if scale is not None:
            found["true_cfg_scale"] = scale
        return found if scale is not None and scale <= 1 else {**found, "negative_prompt": ""}

    def embedded(
        self, embeds: Mapping[str, torch.Tensor], empty: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Each with a mask, and none is cut by the pipeline: the cache has done that."""
        found = super().embedded(embeds, empty)
        masks = {
            f"{name}_mask": torch.ones(tensor.shape[:2], dtype=torch.long, device=tensor.device)
            for name, tensor in found.items()
        }
        return {**found, **masks, "max_sequence_length": 1024}

    def pixels(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The pixels [B, 3, H, W] in [-1, 1] of latents [B, C, h, w], each a single frame."""
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        frames = (latents * std + mean).unsqueeze(2)
        decoded: torch.Tensor = vae.decode(frames, return_dict=False)[0]
        return decoded[:, :, 0]


FAMILY = QwenImage()
