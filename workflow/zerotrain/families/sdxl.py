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
from zerotrain.families.lora import apply_adapter
from zerotrain.families.sdxl_pipeline import load_pipeline
from zerotrain.progress import progress
from zerotrain.tensor_file import open_tensors, write_tensor_file

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config import EvaluateConfig
    from zerotrain.data.dataset import Dataset
    from zerotrain.families import Batch

SAMPLERS = {"ddim": DDIMScheduler, "euler": EulerDiscreteScheduler}
WEIGHTS = "diffusion_pytorch_model"
MAX_SHARD_SIZE = "10GB"


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
    encoding_modules = ("zerotrain.families.sdxl", "zerotrain.families.sdxl_pipeline")
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
        sources = _sources(model, shapes, frozen, config)
        held = _Weights(base / "unet", sources, read)
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


def _sources(
    model: torch.nn.Module,
    shapes: Mapping[str, list[int]],
    frozen: Callable[[str], bool],
    config: Path,
) -> dict[str, str | None]:
    """The trained tensor that fills each of the model's; None where the base's own does.

    Raises:
        PipelineError: naming the first tensor that the model or the training lacks, or whose shape
            differs between them.
    """
    held = model.state_dict(keep_vars=True)
    trained = {id(held[name]): name for name in shapes if name in held}
    # Tied weights are one parameter under several names, of which training knows one.
    found = {n: n if n in shapes else trained.get(id(tensor)) for n, tensor in held.items()}
    for name in sorted(held.keys() | shapes.keys()):
        buffer = name in held and not isinstance(held[name], torch.nn.Parameter)
        source = found.get(name, name)
        if source is None and (buffer or frozen(name)):
            continue
        expected = tuple(held[name].shape) if name in held else "absent"
        given = tuple(shapes[source]) if source is not None and source in shapes else "absent"
        if expected != given:
            raise PipelineError(
                f"{name}: {given} in the trained tensors, {expected} by {config}",
                hint="export the weights with the base model that the training started from",
            )
    return found


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Counters and indices keep their type."""
    return dtype if tensor.is_floating_point() else tensor.dtype


class _Weights:
    """Tensors of the U-Net to write: trained ones, and the base's own where nothing was trained."""

    def __init__(
        self,
        folder: Path,
        sources: Mapping[str, str | None],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._sources = sources
        self._read = read
        kept = None in sources.values()
        self._base = open_tensors(sorted(folder.glob("*.safetensors"))) if kept else {}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of one of the U-Net's own names."""
        source = self._sources[name]
        found: torch.Tensor = (
            self._base[name].get_tensor(name) if source is None else self._read(source)
        )
        return found


FAMILY = Sdxl()
