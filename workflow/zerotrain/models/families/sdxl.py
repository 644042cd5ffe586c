"""The SDXL family: a U-Net over VAE latents, conditioned on two CLIP text encoders and on sizes.

Podell et al., "SDXL: Improving Latent Diffusion Models for High-Resolution Image Synthesis" (2023),
https://arxiv.org/abs/2307.01952. Folders have diffusers' layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.config.families import FAMILIES
from zerotrain.models.families.diffusion import DiffusionFamily
from zerotrain.models.families.objectives import (
    DenoisingObjective,
    LossFunction,
    NoiseSchedule,
    read_noise_schedule,
)
from zerotrain.models.families.pipelines import PipelineEncoders, channel_statistics
from zerotrain.models.families.prompt_tokens import (
    CHUNK,
    TRUNCATE,
    PromptTokenizer,
    set_prompt_tokenizers,
)
from zerotrain.models.families.small_models import (
    PIXELS_PER_LATENT,
    Arguments,
    SmallPipeline,
    SmallSpec,
    clip,
)

if TYPE_CHECKING:
    from zerotrain.models.families import Batch


def count_chunks(tokenizers: Mapping[str, PromptTokenizer], prompts: Sequence[str]) -> list[int]:
    """Count the chunks of each prompt: the maximum over the tokenizers."""
    counts = [tokenizer.chunks(prompts) for tokenizer in tokenizers.values()]
    return [max(row) for row in zip(*counts, strict=True)]


@torch.inference_mode()
def encode_chunks(
    pipeline: Any,
    tokenizers: Mapping[str, PromptTokenizer],
    prompts: Sequence[str],
    count: int,
    guided: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Encode the first `count` chunks of B prompts; a prompt that has fewer gets empty ones.

    Args:
        pipeline: An SDXL pipeline of diffusers.
        tokenizers: Its tokenizers, from set_prompt_tokenizers.
        prompts: B prompts.
        count: Chunks of each.
        guided: Whether the negative embeddings of the empty prompt are encoded, too.

    Returns:
        Embeddings [B, count * T, D], negative ones, and both pooled [B, P], of the first chunk.
    """
    parts = []
    try:
        for chunk in range(count):
            for tokenizer in tokenizers.values():
                tokenizer.chunk = chunk
            parts.append(pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=guided))
    finally:
        for tokenizer in tokenizers.values():
            tokenizer.chunk = 0
    embeds = torch.cat([part[0] for part in parts], dim=1)
    negative = torch.cat([part[1] for part in parts], dim=1) if guided else None
    return embeds, negative, parts[0][2], parts[0][3]


class SdxlEncoders(PipelineEncoders):
    """VAE and text encoders of a base model."""

    def __init__(
        self, base: Path, device: str, dtype: torch.dtype, long_captions: str = TRUNCATE
    ) -> None:
        name = "StableDiffusionXLPipeline"
        super().__init__(name, base, device, dtype, "unet", add_watermarker=False)
        self._chunk = long_captions == CHUNK

    @torch.inference_mode()
    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels [B, 3, H, W] in [-1, 1] to the posterior's mode, scaled [B, C, h, w].

        This inverts what the pipeline does before it decodes.
        """
        vae = self.vae
        latents: torch.Tensor = vae.encode(pixels.to(vae.device)).latent_dist.mode()
        if vae.config.latents_mean is not None and vae.config.latents_std is not None:
            mean, std = channel_statistics(vae, latents.device)
            latents = (latents - mean) / std
        scaled: torch.Tensor = latents * vae.config.scaling_factor
        return scaled.float().cpu()

    @torch.inference_mode()
    def encode_prompts(
        self, prompts: Sequence[str]
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Encode B prompts to `prompt_embeds` [B, T, D] and `pooled_prompt_embeds` [B, P].

        With chunks, the former are B tensors with T tokens for each chunk of a prompt.

        The empty prompt is encoded as the pipeline does without a negative prompt (zeros, if the
        base sets force_zeros_for_empty_prompt): captions dropped in training then train exactly the
        unconditional branch of classifier-free guidance.
        """
        empty = torch.tensor([prompt == "" for prompt in prompts])
        counts = count_chunks(self.tokenizers, prompts) if self._chunk else [1] * len(prompts)
        embeds, negative, pooled, negative_pooled = encode_chunks(
            self.prompt_pipeline, self.tokenizers, prompts, max(counts), bool(empty.any())
        )
        embeds, pooled = embeds.float().cpu(), pooled.float().cpu()
        if negative is not None and negative_pooled is not None:  # some prompt is empty
            embeds[empty] = negative.float().cpu()[empty]
            pooled[empty] = negative_pooled.float().cpu()[empty]
        if not self._chunk:
            return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        length = embeds.shape[1] // max(counts)
        own = [row[: count * length] for row, count in zip(embeds, counts, strict=True)]
        return {"prompt_embeds": own, "pooled_prompt_embeds": pooled}


class SdxlObjective(DenoisingObjective):
    """Denoising with SDXL's added conditions."""

    def predict(
        self,
        model: torch.nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """Compute the U-Net's output for noisy latents, both [B, C, h, w], at timesteps [B]."""
        dtype = next(model.parameters()).dtype
        sizes = [batch["original_size"], batch["crop_top_left"], batch["target_size"]]
        prediction: torch.Tensor = model(
            noisy.to(dtype),
            timesteps,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            encoder_attention_mask=batch.get("prompt_embeds_mask"),
            added_cond_kwargs={
                "text_embeds": batch["pooled_prompt_embeds"].to(dtype),
                "time_ids": torch.cat(sizes, dim=1).to(dtype),
            },
            return_dict=False,
        )[0]
        return prediction


UNET = {
    "nano": {"block_out_channels": (32, 96), "attention_head_dim": (2, 4)},
    "micro": {"block_out_channels": (96, 320), "attention_head_dim": (3, 10)},
}
"""Small U-Nets of 2.1 and 22.1 million parameters; attention_head_dim are numbers of heads."""
TEXT_WIDTHS = {"nano": (48, 80), "micro": (96, 160)}
"""Widths of their two text encoders, by which readers of the original layout distinguish them."""
SIZE_WIDTH = 32
"""Width of the embedding of each of the six size numbers."""


def small_parts(spec: SmallSpec) -> dict[str, Arguments]:
    """Return the arguments of a small model's parts.

    The U-Net has a block of convolutions, then one with attention.
    """
    widths = TEXT_WIDTHS[spec.preset]
    tokenizer = spec.tokenizers["tokenizer"]
    return {
        "text_encoder": clip(tokenizer, widths[0], spec.width),
        "text_encoder_2": clip(tokenizer, widths[1], spec.width),
        "unet": {
            "sample_size": spec.side // PIXELS_PER_LATENT,
            "in_channels": spec.channels,
            "out_channels": spec.channels,
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 1),
            "cross_attention_dim": sum(widths),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": SIZE_WIDTH,
            "projection_class_embeddings_input_dim": spec.width + 6 * SIZE_WIDTH,
            "norm_num_groups": 16,
            **UNET[spec.preset],
        },
    }


class Sdxl(DiffusionFamily):
    """The family of Stable Diffusion XL."""

    # SDXL's noise schedule, with DDIM as the pipeline's sampler.
    small = SmallPipeline(
        tokenizers={"tokenizer": "clip", "tokenizer_2": "clip"},
        parts=small_parts,
        scheduler="DDIMScheduler",
        schedule={
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "clip_sample": False,
            "set_alpha_to_one": False,
            "steps_offset": 1,
            "prediction_type": "v_prediction",
            "timestep_spacing": "trailing",
        },
        shifts=False,
    )

    samplers: Mapping[str, str] = {"ddim": "DDIMScheduler", "euler": "EulerDiscreteScheduler"}

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        long_captions: str = TRUNCATE,
    ) -> SdxlEncoders:
        """Load VAE and text encoders; the U-Net stays on disk."""
        return SdxlEncoders(base, device, dtype, long_captions)

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> SdxlObjective:
        """Build the objective that the base's noise scheduler describes."""
        schedule = read_noise_schedule(base / "scheduler")
        gamma = (settings or {}).get("snr_gamma")
        return SdxlObjective(schedule, gamma, LossFunction.read(settings))

    def shape_objective(self, config: Mapping[str, Any]) -> SdxlObjective:
        """Build the objective with a schedule that predictions do not depend on."""
        return SdxlObjective(NoiseSchedule(torch.ones(1), "epsilon"))

    def pixels(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents [B, C, h, w] of the denoiser to pixels [B, 3, H, W] in [-1, 1]."""
        config = vae.config
        if config.latents_mean is not None and config.latents_std is not None:
            mean, std = channel_statistics(vae, latents.device)
            latents = latents * std + mean * config.scaling_factor
        return super().pixels(vae, latents)

    def batches(
        self, pipeline: Any, prompts: Sequence[str], size: int, long_captions: str
    ) -> list[range]:
        """Batch prompts with the same number of chunks: the pipeline takes no mask."""
        if long_captions == TRUNCATE:
            return super().batches(pipeline, prompts, size, long_captions)
        counts = count_chunks(set_prompt_tokenizers(pipeline), prompts)
        found = []
        for _, group in groupby(range(len(prompts)), key=counts.__getitem__):
            places = list(group)
            ends = range(places[0], places[-1] + 1, size)
            found += [range(start, min(start + size, places[-1] + 1)) for start in ends]
        return found

    def prompt_arguments(
        self, pipeline: Any, prompts: Sequence[str], long_captions: str
    ) -> dict[str, Any]:
        """Encode prompts in chunks, and the empty prompt in as many."""
        if long_captions == TRUNCATE:
            return super().prompt_arguments(pipeline, prompts, long_captions)
        tokenizers = set_prompt_tokenizers(pipeline)
        count = max(count_chunks(tokenizers, prompts))
        embeds, negative, pooled, negative_pooled = encode_chunks(
            pipeline, tokenizers, prompts, count, True
        )
        return {
            "prompt_embeds": embeds,
            "negative_prompt_embeds": negative,
            "pooled_prompt_embeds": pooled,
            "negative_pooled_prompt_embeds": negative_pooled,
        }

    def embedded(
        self, embeds: Mapping[str, torch.Tensor], empty: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Repeat the empty prompt to as many chunks as the prompt has."""
        count = embeds["prompt_embeds"].shape[1] // empty["prompt_embeds"].shape[1]
        longer = {**empty, "prompt_embeds": empty["prompt_embeds"].repeat(1, count, 1)}
        return super().embedded(embeds, longer)


FAMILY = Sdxl(FAMILIES["sdxl"])
