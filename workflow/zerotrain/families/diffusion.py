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
        if config.scheduler != "default":
            pipeline.scheduler = self._sampler(config.scheduler).from_config(
                pipeline.scheduler.config
            )
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

    def _class(self) -> Any:
        return getattr(diffusers, self.classes[self.trained_part])

    def _sampler(self, name: str) -> Any:
        if name not in self.samplers:
            raise PipelineError(
                f"evaluate.scheduler: {name} is no sampler of the family {self.name}",
                hint=f"choose {' or '.join(['default', *self.samplers])}",
            )
        return getattr(diffusers, self.samplers[name])
