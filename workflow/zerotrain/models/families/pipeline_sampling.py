"""Sampling of images with diffusers' pipelines, from a weights folder or a model in training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import logging as diffusers_logging

from zerotrain.config.families import FamilySpec
from zerotrain.errors import PipelineError
from zerotrain.machine.progress_bar import progress
from zerotrain.models.families.conditioned_sampling import ConditionedSampling, conditioning_pixels
from zerotrain.models.families.pipelines import load_pipeline, sampling_dtype
from zerotrain.models.families.prompt_tokens import (
    TRUNCATE,
    TokenLimit,
    set_prompt_tokenizers,
    token_limits,
)
from zerotrain.models.pretrained import from_config, from_pretrained, read_config

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config.models import EvaluateConfig


class PipelineSampling(ConditionedSampling):
    """The part of a diffusion family that samples images."""

    spec: FamilySpec
    trained_part: str
    always_conditioned = False
    """Whether one pipeline samples with and without conditioning images."""
    samplers: Mapping[str, str] = {}
    """Classes of the schedulers that evaluate.scheduler may name, other than the base's own."""

    def sampling_arguments(
        self, pipeline: Any, config: EvaluateConfig, max_sequence_length: int | None
    ) -> dict[str, Any]:
        """Build the pipeline's arguments other than prompts, size, steps and generators.

        A `negative_prompt` among them applies to every image.
        """
        scale = config.guidance_scale
        return {} if scale is None else {"guidance_scale": scale}

    def pipeline_name(self, folder: Path) -> str:
        """Return the class that a folder's model_index.json names, if it is one of the family's."""
        index = read_config(folder / "model_index.json")
        named = str(index.get("_class_name"))
        return named if named in self.spec.conditioning else self.spec.pipeline

    def load_pipeline(self, folder: Path, device: str, **parts: Any) -> Any:
        """Load the pipeline of a folder, with its adapter, in the type for sampling.

        It is in host memory; see pipelines.place_pipeline.
        """
        arguments = {**self.spec.loading, **parts}
        name = self.pipeline_name(folder)
        return load_pipeline(name, folder, sampling_dtype(device), **arguments)

    def draw(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        seeds: Sequence[int],
        config: EvaluateConfig,
        *,
        resolution: int | tuple[int, int] | None = None,
        max_sequence_length: int | None = None,
        long_captions: str = TRUNCATE,
        conditioning: Sequence[Sequence[Image]] | None = None,
    ) -> list[Image]:
        """Sample one image per prompt; its initial noise comes from its own seed, on CPU.

        Without a resolution, images have the model's native size. A warning counts the prompts that
        the text encoders cut.

        Args:
            pipeline: Pipeline from load_pipeline, on its device.
            prompts: The prompts.
            seeds: The seed of each image.
            config: Settings of the sampling.
            resolution: Side in pixels, or width and height.
            max_sequence_length: Tokens of a prompt; None for the family's default.
            long_captions: How prompts that are too long are read.
            conditioning: The conditioning images of each prompt, RGB and of any size: their centre
                squares are scaled to the resolution.

        Raises:
            PipelineError: the pipeline needs conditioning images, has no input for them, or takes
                another number; or they are given for an image that is no square.
        """
        width, height = resolution if isinstance(resolution, tuple) else (resolution, resolution)
        if conditioning is not None and width != height:
            raise PipelineError(
                f"{width}x{height}: with conditioning images, images are squares",
                hint="give one side",
            )
        pixels: list[torch.Tensor] | None = None
        if conditioning is not None:
            pipeline = self.conditioned_pipeline(pipeline)
            own = pipeline.default_sample_size * pipeline.vae_scale_factor
            width = height = width or own
            pixels = conditioning_pixels(conditioning, width)
        set_prompt_tokenizers(pipeline)
        distinct = list(dict.fromkeys(prompts))
        for limit in self.token_limits(pipeline, distinct, max_sequence_length):
            if long_captions == TRUNCATE:
                print(f"WARNING: {limit.describe('prompts')}", file=sys.stderr, flush=True)
        self._choose_sampler(pipeline, config)
        arguments = self.sampling_arguments(pipeline, config, max_sequence_length)
        negative = arguments.pop("negative_prompt", None)

        def calls() -> Iterator[list[Image]]:
            # Editing pipelines take one prompt with its images at a time.
            size = config.batch_size if pixels is None else 1
            for places in self.batches(pipeline, prompts, size, long_captions):
                batch = [prompts[place] for place in places]
                noise = [torch.Generator("cpu").manual_seed(seeds[place]) for place in places]
                if pixels is not None:
                    asked = self.conditioned_arguments(
                        pipeline,
                        batch,
                        torch.stack([pixels[place] for place in places]),
                        negative=negative,
                        max_sequence_length=max_sequence_length,
                    )
                else:
                    asked = self.prompt_arguments(pipeline, batch, long_captions)
                    # Not every pipeline repeats a single negative prompt for a batch.
                    if negative is not None:
                        asked["negative_prompt"] = [negative] * len(noise)
                yield pipeline(
                    **asked,
                    height=height,
                    width=width,
                    num_inference_steps=config.num_inference_steps,
                    generator=noise,
                    **arguments,
                ).images

        made = progress(calls(), len(prompts), "sampling images", "image", count=len)
        return [image for images in made for image in images]

    def batches(
        self, pipeline: Any, prompts: Sequence[str], size: int, long_captions: str
    ) -> list[range]:
        """Split the prompts' positions into calls of the pipeline, at most `size` in a call."""
        starts = range(0, len(prompts), size)
        return [range(start, min(start + size, len(prompts))) for start in starts]

    def prompt_arguments(
        self, pipeline: Any, prompts: Sequence[str], long_captions: str
    ) -> dict[str, Any]:
        """Build the pipeline's arguments for the prompts of a call."""
        return {"prompt": list(prompts)}

    def caption_limits(
        self, base: Path, captions: Sequence[str], max_sequence_length: int | None = None
    ) -> list[TokenLimit]:
        """List the limits of a base's text encoders that some caption exceeds.

        Args:
            base: Folder of the base model; only its tokenizers are loaded.
            captions: Captions.
            max_sequence_length: Tokens of a prompt; None for the family's default.
        """
        absent = {name for name in self.spec.parts if not name.startswith("tokenizer")}
        arguments = {**self.spec.loading, **dict.fromkeys(absent)}
        pipeline = load_pipeline(self.pipeline_name(base), base, torch.float32, **arguments)
        return self.token_limits(pipeline, captions, max_sequence_length)

    def token_limits(
        self, pipeline: Any, prompts: Sequence[str], max_sequence_length: int | None
    ) -> list[TokenLimit]:
        """List the limits of a pipeline's text encoders that some prompt exceeds."""
        tokenizers = set_prompt_tokenizers(pipeline)
        limits = {
            name: self.read_tokens(pipeline, name, max_sequence_length) for name in tokenizers
        }
        counts = {name: self.count_tokens(pipeline, name, prompts) for name in tokenizers}
        return token_limits(limits, counts)

    def read_tokens(self, pipeline: Any, tokenizer: str, max_sequence_length: int | None) -> int:
        """Return the number of tokens that a tokenizer's encoder reads, with special ones."""
        found: int = getattr(pipeline, tokenizer).model_max_length
        return found

    def count_tokens(self, pipeline: Any, tokenizer: str, prompts: Sequence[str]) -> list[int]:
        """Count the tokens of each prompt, including those that the pipeline adds."""
        found: list[int] = getattr(pipeline, tokenizer).count(prompts)
        return found

    def live_pipeline(
        self,
        base: Path,
        model: torch.nn.Module,
        resolution: int,
        shape: Sequence[int],
        config: EvaluateConfig,
        *,
        conditioned: bool = False,
    ) -> Any:
        """Build a pipeline around a model in training, without encoders and autoencoder.

        Args:
            base: Folder of the base model, whose noise scheduler is used.
            model: The trained part, from load_model.
            resolution: Side of its images in pixels.
            shape: C, h and w of their latents.
            config: Names the sampler.
            conditioned: Whether it takes conditioning images.
        """
        absent = {name for name in self.spec.parts if name not in ("scheduler", self.trained_part)}
        arguments = {**self.spec.loading, **dict.fromkeys(absent)}
        name, own = self.pipeline_name(base), {self.trained_part: model}
        pipeline = load_pipeline(name, base, torch.float32, **arguments, **own)
        if conditioned or self.always_conditioned:
            pipeline = self.conditioned_pipeline(pipeline)
        # Without an autoencoder, a pipeline assumes a factor of 8 and 16 channels.
        pipeline.vae_scale_factor, pipeline.latent_channels = resolution // shape[-1], shape[0]
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
        conditioning: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Sample the latents, float32 [C, h, w] on CPU, of the image that `draw` makes.

        Args:
            pipeline: Pipeline from live_pipeline.
            embeds: Result of Encoders.encode_prompts for the prompt, with leading dimension 1.
            empty: The same for the empty prompt.
            seed: Decides the noise.
            config: Settings of the sampling.
            resolution: As for the pipeline.
            shape: As for the pipeline.
            conditioning: Result of Encoders.encode_conditioning for the prompt's conditioning
                images, with leading dimension 1.
        """
        arguments = self.sampling_arguments(pipeline, config, None)
        for name in ("negative_prompt", "max_sequence_length"):  # the embeddings include them
            arguments.pop(name, None)
        if conditioning is not None:
            arguments |= self.encoded_conditioning(pipeline, conditioning, resolution)
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
        """Decode latents [B, C, h, w] to images with the base's autoencoder in float32."""
        diffusers_logging.disable_progress_bar()
        vae = from_pretrained(
            getattr(diffusers, self.spec.classes["vae"]),
            base,
            subfolder="vae",
            dtype=torch.float32,
            use_safetensors=True,
        )
        vae.to(device).eval()
        with torch.inference_mode():
            pixels = [self.pixels(vae, one[None].to(device)) for one in latents]
        images: list[Image] = VaeImageProcessor().postprocess(torch.cat(pixels))
        return images

    def embedded(
        self, embeds: Mapping[str, torch.Tensor], empty: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Build the pipeline's arguments that replace the prompt and the negative prompt."""
        return {**embeds, **{f"negative_{name}": tensor for name, tensor in empty.items()}}

    def unpacked(self, latents: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Reshape the pipeline's latents to [B, C, h, w]; `shape` is C, h and w."""
        return latents

    def pixels(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents [B, C, h, w] of the denoiser to pixels [B, 3, H, W] in [-1, 1]."""
        unscaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        decoded: torch.Tensor = vae.decode(unscaled, return_dict=False)[0]
        return decoded

    def _choose_sampler(self, pipeline: Any, config: EvaluateConfig) -> None:
        if config.scheduler != "default":
            pipeline.scheduler = from_config(
                self._sampler(config.scheduler), pipeline.scheduler.config
            )

    def _sampler(self, name: str) -> Any:
        if name not in self.samplers:
            raise PipelineError(
                f"evaluate.scheduler: {name} is not a sampler of the family {self.name}",
                hint=f"choose {' or '.join(['default', *self.samplers])}",
            )
        return getattr(diffusers, self.samplers[name])
