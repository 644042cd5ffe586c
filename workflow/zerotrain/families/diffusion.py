"""What the diffusion families have in common: a pipeline of diffusers with one denoiser in it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import diffusers
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import logging as diffusers_logging

from zerotrain.errors import PipelineError
from zerotrain.families import adapters
from zerotrain.families.identity import CHANNELS, identity_autoencoder
from zerotrain.families.model_tensors import ModelTensors, tensor_sources, write_model
from zerotrain.families.pipelines import load_pipeline
from zerotrain.families.placement import place_pipeline, sampling_dtype
from zerotrain.progress import progress

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config import EvaluateConfig
    from zerotrain.data.dataset import Dataset
    from zerotrain.families import Encoders, Objective

WEIGHTS = "diffusion_pytorch_model"


class DiffusionFamily(ABC):
    """A family of diffusers' pipelines; see zerotrain.families.Family."""

    name: str
    modality: Literal["image"] = "image"
    parts: tuple[str, ...]
    optional_parts: tuple[str, ...] = ()
    image_parts: tuple[str, ...] = ("vae",)
    text_parts: tuple[str, ...]
    encoding_code: tuple[str, ...]
    classes: Mapping[str, str]
    trained_part: str
    pipeline: str
    """Name of the pipeline's class in diffusers."""
    samplers: Mapping[str, str] = {}
    """Schedulers that evaluate.scheduler may name, beside the base's own, and their classes."""

    @abstractmethod
    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Encoders:
        """Load autoencoder and text encoders; the denoiser stays on disk."""

    @abstractmethod
    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> Objective:
        """The objective that the base's noise scheduler describes."""

    def sampling_arguments(
        self, pipeline: Any, config: EvaluateConfig, max_sequence_length: int | None
    ) -> dict[str, Any]:
        """What the pipeline is called with beside prompts, size, steps and generators.

        A `negative_prompt` among it is that of every image.
        """
        scale = config.guidance_scale
        return {} if scale is None else {"guidance_scale": scale}

    def loading_arguments(self) -> dict[str, Any]:
        """What the pipeline is loaded with."""
        return {}

    def build_preset(
        self,
        preset: str,
        dataset: Dataset,
        images: Sequence[Image],
        seed: int,
        out: Path,
        *,
        identity: bool = False,
    ) -> None:
        """Build the preset into `out`, with a tokenizer and an autoencoder of the dataset."""
        captions = [sample.caption for sample in dataset.split("train")]
        nano = importlib.import_module(f"zerotrain.families.{self.name}_nano")
        nano.build_nano(
            captions, images, seed, out, preset=preset, **({"identity": True} if identity else {})
        )

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """Channels of the latents that a denoiser with this config.json takes."""
        found: int = config["in_channels"]
        return found

    def replace_autoencoder(self, base: Path) -> None:
        """Put one that gives back its pixels in the place of the base's; see Family."""
        path = base / self.trained_part / "config.json"
        channels = self.latent_channels(json.loads(path.read_text()))
        if channels != CHANNELS:
            raise PipelineError(
                f"vae: identity makes pixels of {CHANNELS} channels the latents, and the "
                f"{self.trained_part} of this base takes latents of {channels}",
                hint="remove `vae`, or choose a base that was made for pixels: `nano` is",
            )
        shutil.rmtree(base / "vae")
        identity_autoencoder(self.classes["vae"]).save_pretrained(base / "vae")

    def load_model(self, base: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the denoiser on CPU, in float32 if no type is given."""
        model: torch.nn.Module = self._class().from_pretrained(
            base,
            subfolder=self.trained_part,
            dtype=dtype or torch.float32,
            use_safetensors=True,
        )
        return model

    def empty_model(self, base: Path) -> torch.nn.Module:
        """The denoiser that config.json describes, on the meta device."""
        config = self._class().load_config(base / self.trained_part / "config.json")
        # Not accelerate's init_empty_weights, which cuts ties.
        with torch.device("meta"):
            model: torch.nn.Module = self._class().from_config(config)
        return model

    def load_trained(self, weights: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Load the denoiser of a weights folder on CPU, with the folder's adapter; in float32 if
        no type is given."""
        model = self.load_model(weights, dtype).eval()
        adapters.apply(model, weights)
        return model

    def save_model(
        self,
        base: Path,
        shapes: Mapping[str, list[int]],
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        out: Path,
        *,
        frozen: Callable[[str], bool] = lambda name: False,
        max_shard_size: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Write the denoiser beside an unchanged copy of the base's config.json; see Family."""
        part = self.trained_part
        config = base / part / "config.json"
        model = self.empty_model(base)
        sources = tensor_sources(model, shapes, frozen, config)
        held = ModelTensors(base / part, sources, read)
        folder = out / part
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config, folder / "config.json")
        known = write_model(
            model, held.tensor, dtype, folder, WEIGHTS,
            max_shard_size=max_shard_size, metadata=metadata,
        )  # fmt: skip
        return {f"{part}/{file}": sha256 for file, sha256 in known.items()}

    def sample(
        self,
        weights: Path,
        prompts: Sequence[str],
        seeds: Sequence[int],
        config: EvaluateConfig,
        *,
        resolution: int,
        device: str,
        max_sequence_length: int | None = None,
    ) -> list[Image]:
        """One square image per prompt, by the pipeline of a weights folder; see `draw`."""
        pipeline = place_pipeline(self.load_pipeline(weights, device), device)
        return self.draw(
            pipeline,
            prompts,
            seeds,
            config,
            resolution=resolution,
            max_sequence_length=max_sequence_length,
        )

    def load_pipeline(self, folder: Path, device: str, **parts: Any) -> Any:
        """The pipeline of a folder, with its adapter, in the type that images are made in.

        It lies in the host's memory: see placement.place_pipeline.
        """
        arguments = {**self.loading_arguments(), **parts}
        return load_pipeline(self.pipeline, folder, sampling_dtype(device), **arguments)

    def draw(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        seeds: Sequence[int],
        config: EvaluateConfig,
        *,
        resolution: int | None = None,
        max_sequence_length: int | None = None,
    ) -> list[Image]:
        """One square image per prompt; its starting noise comes from its own seed, drawn on CPU.

        Without a resolution the images have the size that the model was made for.
        """
        self._choose_sampler(pipeline, config)
        arguments = self.sampling_arguments(pipeline, config, max_sequence_length)
        negative = arguments.pop("negative_prompt", None)

        def images() -> Iterator[Image]:
            for start in range(0, len(prompts), config.batch_size):
                stop = start + config.batch_size
                noise = [torch.Generator("cpu").manual_seed(seed) for seed in seeds[start:stop]]
                # Not every pipeline repeats a single one for a batch.
                if negative is not None:
                    arguments["negative_prompt"] = [negative] * len(noise)
                yield from pipeline(
                    prompt=list(prompts[start:stop]),
                    height=resolution,
                    width=resolution,
                    num_inference_steps=config.num_inference_steps,
                    generator=noise,
                    **arguments,
                ).images

        return list(progress(images(), len(prompts), "sampling images", "image"))

    def live_pipeline(
        self,
        base: Path,
        model: torch.nn.Module,
        resolution: int,
        shape: Sequence[int],
        config: EvaluateConfig,
    ) -> Any:
        """A pipeline around a model that is trained, without encoders and autoencoder."""
        absent = {name for name in self.parts if name not in ("scheduler", self.trained_part)}
        arguments = {**self.loading_arguments(), **dict.fromkeys(absent)}
        pipeline = load_pipeline(
            self.pipeline, base, torch.float32, **arguments, **{self.trained_part: model}
        )
        # Without an autoencoder a pipeline takes its factor to be 8.
        pipeline.vae_scale_factor = resolution // shape[-1]
        self._choose_sampler(pipeline, config)
        return pipeline

    def sample_latents(
        self,
        pipeline: Any,
        embeds: Mapping[str, torch.Tensor],
        empty: Mapping[str, torch.Tensor],
        seed: int,
        config: EvaluateConfig,
        *,
        resolution: int,
        shape: Sequence[int],
    ) -> torch.Tensor:
        """Latents float32 [C, h, w] on the CPU, of the image that `sample` makes of this seed."""
        arguments = self.sampling_arguments(pipeline, config, None)
        for name in ("negative_prompt", "max_sequence_length"):  # the embeddings have them
            arguments.pop(name, None)
        found = pipeline(
            **self.embedded(embeds, empty),
            height=resolution,
            width=resolution,
            num_inference_steps=config.num_inference_steps,
            generator=[torch.Generator("cpu").manual_seed(seed)],
            output_type="latent",
            **arguments,
        ).images
        return self.unpacked(found, shape)[0].float().cpu()

    def decode_latents(self, base: Path, latents: torch.Tensor, device: str) -> list[Image]:
        """The image of each of latents [B, C, h, w], by the base's autoencoder in float32."""
        diffusers_logging.disable_progress_bar()
        vae = getattr(diffusers, self.classes["vae"]).from_pretrained(
            base, subfolder="vae", dtype=torch.float32, use_safetensors=True
        )
        vae.to(device).eval()
        with torch.inference_mode():
            pixels = [self.pixels(vae, one[None].to(device)) for one in latents]
        images: list[Image] = VaeImageProcessor().postprocess(torch.cat(pixels))
        return images

    def embedded(
        self, embeds: Mapping[str, torch.Tensor], empty: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """What the pipeline takes in the place of a prompt and of the one to guide away from."""
        return {**embeds, **{f"negative_{name}": tensor for name, tensor in empty.items()}}

    def unpacked(self, latents: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The pipeline's latents as [B, C, h, w]; `shape` is C, h and w."""
        return latents

    def pixels(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The pixels [B, 3, H, W] in [-1, 1] of latents [B, C, h, w] as the denoiser has them."""
        unscaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        decoded: torch.Tensor = vae.decode(unscaled, return_dict=False)[0]
        return decoded

    def _choose_sampler(self, pipeline: Any, config: EvaluateConfig) -> None:
        if config.scheduler != "default":
            pipeline.scheduler = self._sampler(config.scheduler).from_config(
                pipeline.scheduler.config
            )

    def _class(self) -> Any:
        return getattr(diffusers, self.classes[self.trained_part])

    def _sampler(self, name: str) -> Any:
        if name not in self.samplers:
            raise PipelineError(
                f"evaluate.scheduler: {name} is no sampler of the family {self.name}",
                hint=f"choose {' or '.join(['default', *self.samplers])}",
            )
        return getattr(diffusers, self.samplers[name])
