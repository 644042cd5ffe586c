"""SDXL's encoders: images to scaled latents, prompts to the embeddings of two text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from zerotrain.families.sdxl_pipeline import load_pipeline


class SdxlEncoders:
    """VAE and text encoders of a base model, used through the pipeline's own code."""

    def __init__(self, base: Path, device: str) -> None:
        self.pipeline = load_pipeline(base, torch.float32, unet=None).to(device)

    @torch.inference_mode()
    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] to scaled latents [B, C, h, w]: the posterior's mode.

        It is the inverse of what the pipeline does before it decodes.
        """
        vae = self.pipeline.vae
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
        embeds, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=bool(empty.any())
        )
        embeds, pooled = embeds.float().cpu(), pooled.float().cpu()
        if empty.any():
            embeds[empty] = negative.float().cpu()[empty]
            pooled[empty] = negative_pooled.float().cpu()[empty]
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
