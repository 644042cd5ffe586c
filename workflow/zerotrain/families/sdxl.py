"""The SDXL family: a U-Net over VAE latents, conditioned on two CLIP text encoders and on sizes.

Podell et al., "SDXL: Improving Latent Diffusion Models for High-Resolution Image Synthesis" (2023),
https://arxiv.org/abs/2307.01952. Folders have diffusers' layout.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from huggingface_hub import split_torch_state_dict_into_shards

from zerotrain.artifact import write_json
from zerotrain.errors import PipelineError
from zerotrain.families.ddpm import DenoisingObjective, read_noise_schedule
from zerotrain.families.denoiser_tensors import DenoiserTensors, tensor_sources
from zerotrain.families.lora import apply_adapter
from zerotrain.families.sdxl_encoders import SdxlEncoders
from zerotrain.families.sdxl_pipeline import load_pipeline
from zerotrain.progress import progress
from zerotrain.tensor_file import write_tensor_file

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config import EvaluateConfig
    from zerotrain.data.dataset import Dataset
    from zerotrain.families import Batch

SAMPLERS = {"ddim": DDIMScheduler, "euler": EulerDiscreteScheduler}
WEIGHTS = "diffusion_pytorch_model"
MAX_SHARD_SIZE = "10GB"


class SdxlObjective(DenoisingObjective):
    """Denoising with SDXL's added conditions."""

    def predict(
        self,
        denoiser: torch.nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """The U-Net's output [B, C, h, w] for noisy latents [B, C, h, w] at timesteps [B]."""
        dtype = next(denoiser.parameters()).dtype
        sizes = [batch.original_size, batch.crop_top_left, batch.target_size]
        prediction: torch.Tensor = denoiser(
            noisy.to(dtype),
            timesteps,
            encoder_hidden_states=batch.text["prompt_embeds"].to(dtype),
            added_cond_kwargs={
                "text_embeds": batch.text["pooled_prompt_embeds"].to(dtype),
                "time_ids": torch.cat(sizes, dim=1).to(dtype),
            },
            return_dict=False,
        )[0]
        return prediction


class Sdxl:
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
    image_parts = ("vae",)
    # model_index.json says how the empty prompt is encoded.
    text_parts = ("model_index.json", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    encoding_modules = ("zerotrain.families.sdxl_encoders", "zerotrain.families.sdxl_pipeline")
    denoiser_part = "unet"
    classes: Mapping[str, str] = {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
    }

    def build_preset(
        self, preset: str, dataset: Dataset, images: Sequence[Image], seed: int, out: Path
    ) -> None:
        """Build the `nano` model into `out`, with a tokenizer and an autoencoder of the dataset."""
        from zerotrain.families.sdxl_nano import build_nano

        if preset != "nano":
            raise PipelineError(
                f"base: the family sdxl has no preset {preset!r}",
                hint="use `nano`, a folder in diffusers layout, or a hub id",
            )
        captions = [sample.caption for sample in dataset.split("train")]
        build_nano(captions, images, seed, out)

    def load_encoders(self, base: Path, device: str) -> SdxlEncoders:
        """Load VAE and text encoders in float32; the U-Net stays on disk."""
        return SdxlEncoders(base, device)

    def load_denoiser(self, base: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the U-Net on CPU, in float32 if no type is given."""
        unet: torch.nn.Module = UNet2DConditionModel.from_pretrained(
            base, subfolder="unet", dtype=dtype or torch.float32, use_safetensors=True
        )
        return unet

    def empty_denoiser(self, base: Path) -> torch.nn.Module:
        """The U-Net that config.json describes, on the meta device."""
        config = UNet2DConditionModel.load_config(base / "unet" / "config.json")
        with torch.device("meta"):
            unet: torch.nn.Module = UNet2DConditionModel.from_config(config)
        return unet

    def load_trained(self, weights: Path) -> torch.nn.Module:
        """Load the U-Net of a weights folder in float32 on CPU, with the folder's adapter."""
        unet = self.load_denoiser(weights).eval()
        apply_adapter(unet, weights)
        return unet

    def objective(self, base: Path) -> SdxlObjective:
        """The objective that the base's noise scheduler describes."""
        return SdxlObjective(read_noise_schedule(base / "scheduler"))

    def save_denoiser(
        self,
        base: Path,
        shapes: Mapping[str, list[int]],
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        out: Path,
        *,
        frozen: Callable[[str], bool] = lambda name: False,
    ) -> dict[str, str]:
        """Write the U-Net beside an unchanged copy of the base's config.json; see Family."""
        config = base / "unet" / "config.json"
        model = self.empty_denoiser(base)
        sources = tensor_sources(model, shapes, frozen, config)
        held = DenoiserTensors(base / "unet", sources, read)
        expected = model.state_dict()
        folder = out / "unet"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config, folder / "config.json")
        plan = split_torch_state_dict_into_shards(
            {n: torch.empty_like(t, dtype=_stored(t, dtype)) for n, t in expected.items()},
            filename_pattern=WEIGHTS + "{suffix}.safetensors",
            max_shard_size=MAX_SHARD_SIZE,
        )
        known = {}
        for file, names in plan.filename_to_tensors.items():
            layout = {n: (_stored(expected[n], dtype), expected[n].shape) for n in sorted(names)}
            known[f"unet/{file}"] = write_tensor_file(folder / file, layout, held.tensor)
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            write_json(folder / f"{WEIGHTS}.safetensors.index.json", index)
        return known

    def sample(
        self,
        weights: Path,
        prompts: Sequence[str],
        seeds: Sequence[int],
        config: EvaluateConfig,
        *,
        resolution: int,
        device: str,
    ) -> list[Image]:
        """One square image per prompt; its starting noise comes from its own seed, drawn on CPU."""
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        pipeline = load_pipeline(weights, dtype).to(device)
        if config.scheduler != "default":
            pipeline.scheduler = SAMPLERS[config.scheduler].from_config(pipeline.scheduler.config)

        def images() -> Iterator[Image]:
            for start in range(0, len(prompts), config.batch_size):
                stop = start + config.batch_size
                noise = [torch.Generator("cpu").manual_seed(seed) for seed in seeds[start:stop]]
                yield from pipeline(
                    prompt=list(prompts[start:stop]),
                    height=resolution,
                    width=resolution,
                    num_inference_steps=config.num_inference_steps,
                    guidance_scale=config.guidance_scale,
                    generator=noise,
                ).images

        return list(progress(images(), len(prompts), "sampling images", "image"))


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Counters and indices keep their type."""
    return dtype if tensor.is_floating_point() else tensor.dtype


FAMILY = Sdxl()
