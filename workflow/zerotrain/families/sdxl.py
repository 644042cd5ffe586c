"""The SDXL family: a U-Net over VAE latents, conditioned on two CLIP text encoders and on sizes.

Podell et al., "SDXL: Improving Latent Diffusion Models for High-Resolution Image Synthesis" (2023),
https://arxiv.org/abs/2307.01952. Folders have diffusers' layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.families.ddpm import DenoisingObjective, read_noise_schedule
from zerotrain.families.diffusion import DiffusionFamily
from zerotrain.families.pipelines import PipelineEncoders

if TYPE_CHECKING:
    from zerotrain.families import Batch


class SdxlEncoders(PipelineEncoders):
    """VAE and text encoders of a base model."""

    def __init__(self, base: Path, device: str, dtype: torch.dtype) -> None:
        name = "StableDiffusionXLPipeline"
        super().__init__(name, base, device, dtype, "unet", add_watermarker=False)

    @torch.inference_mode()
    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] to scaled latents [B, C, h, w]: the posterior's mode.

        It is the inverse of what the pipeline does before it decodes.
        """
        vae = self.vae
        latents: torch.Tensor = vae.encode(pixels.to(vae.device)).latent_dist.mode()
        if vae.config.latents_mean is not None and vae.config.latents_std is not None:
            mean, std = (
                torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
                for values in (vae.config.latents_mean, vae.config.latents_std)
            )
            latents = (latents - mean) / std
        scaled: torch.Tensor = latents * vae.config.scaling_factor
        return scaled.float().cpu()

    @torch.inference_mode()
    def encode_prompts(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """B prompts to `prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P].

        The empty prompt becomes what the pipeline uses where no negative prompt is given (zeros, if
        the base says force_zeros_for_empty_prompt): captions dropped in training then teach exactly
        the unconditional branch of classifier-free guidance.
        """
        empty = torch.tensor([prompt == "" for prompt in prompts])
        embeds, negative, pooled, negative_pooled = self.prompt_pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=bool(empty.any())
        )
        embeds, pooled = embeds.float().cpu(), pooled.float().cpu()
        if empty.any():
            embeds[empty] = negative.float().cpu()[empty]
            pooled[empty] = negative_pooled.float().cpu()[empty]
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


class SdxlObjective(DenoisingObjective):
    """Denoising with SDXL's added conditions."""

    def predict(
        self,
        model: torch.nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """The U-Net's output [B, C, h, w] for noisy latents [B, C, h, w] at timesteps [B]."""
        dtype = next(model.parameters()).dtype
        sizes = [batch["original_size"], batch["crop_top_left"], batch["target_size"]]
        prediction: torch.Tensor = model(
            noisy.to(dtype),
            timesteps,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            added_cond_kwargs={
                "text_embeds": batch["pooled_prompt_embeds"].to(dtype),
                "time_ids": torch.cat(sizes, dim=1).to(dtype),
            },
            return_dict=False,
        )[0]
        return prediction


class Sdxl(DiffusionFamily):
    """The family's parts and acts; see zerotrain.families.Family."""

    name = "sdxl"
    parts = (
        "scheduler",
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "unet",
        "vae",
    )
    # model_index.json says how the empty prompt is encoded.
    text_parts = ("model_index.json", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    encoding_code = ("zerotrain.families.sdxl:SdxlEncoders", "zerotrain.families.pipelines")
    trained_part = "unet"
    classes: Mapping[str, str] = {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
    }
    pipeline = "StableDiffusionXLPipeline"
    samplers: Mapping[str, str] = {"ddim": "DDIMScheduler", "euler": "EulerDiscreteScheduler"}

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> SdxlEncoders:
        """Load VAE and text encoders; the U-Net stays on disk."""
        return SdxlEncoders(base, device, dtype)

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> SdxlObjective:
        """The objective that the base's noise scheduler describes."""
        schedule = read_noise_schedule(base / "scheduler")
        return SdxlObjective(schedule, (settings or {}).get("snr_gamma"))

    def pixels(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The pixels [B, 3, H, W] in [-1, 1] of latents [B, C, h, w] as the denoiser has them."""
        config = vae.config
        if config.latents_mean is not None and config.latents_std is not None:
            mean, std = (
                torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
                for values in (config.latents_mean, config.latents_std)
            )
            latents = latents * std + mean * config.scaling_factor
        return super().pixels(vae, latents)

    def loading_arguments(self) -> dict[str, Any]:
        """The pipeline would hide a watermark in its images, if the package is there."""
        return {"add_watermarker": False}


FAMILY = Sdxl()
