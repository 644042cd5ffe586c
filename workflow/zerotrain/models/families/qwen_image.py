"""The Qwen-Image family: a transformer over packed latents, conditioned on Qwen2.5-VL's text.

Wu et al., "Qwen-Image Technical Report" (2025), https://arxiv.org/abs/2508.02324; trained by flow
matching as in diffusers' examples/dreambooth/train_dreambooth_lora_qwen_image.py. The autoencoder
is for videos; an image is a single frame. Qwen-Image-Edit has the same transformer, which reads
conditioning images as further patches; its text encoder sees them, too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from torch.nn.utils.rnn import pad_sequence

from zerotrain.config.families import FAMILIES
from zerotrain.models.families.conditioned_sampling import extended_input
from zerotrain.models.families.patches import (
    PackedFamily,
    PackedObjective,
    append_conditioning,
    check_patches,
    pack,
    unpack,
)
from zerotrain.models.families.pipelines import PipelineEncoders, channel_statistics, prompt_length
from zerotrain.models.families.qwen_image_encoding import (
    add_token_types,
    count_text_tokens,
    encode_latents,
    encode_with_images,
    load_processor,
    sees_images,
)
from zerotrain.models.families.qwen_image_nano import SMALL

if TYPE_CHECKING:
    from zerotrain.config.models import EvaluateConfig
    from zerotrain.models.families import Batch


class ConditionedQwenImagePipeline(QwenImagePipeline):  # type: ignore[misc]
    """QwenImagePipeline that takes `conditioning_latents` [B, n, C, h, w] with embeddings.

    Their tokens follow those of the image, as in diffusers' editing pipelines and DiffSynth's
    in-context control (QwenImageUnit_ContextImageEmbedder): one loop samples for all of them.
    diffusers' own loops take images, which they scale to an area of 1024 x 1024 pixels, and one
    prompt at a time.

    Attributes:
        encoding: The pipeline that encodes prompts, of the class that the base names.
    """

    encoding: Any

    @classmethod
    def around(cls, pipeline: Any) -> ConditionedQwenImagePipeline:
        """Build a pipeline around the parts of another pipeline of Qwen-Image."""
        names = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
        made = cls(**{name: getattr(pipeline, name) for name in names})
        made.set_progress_bar_config(disable=True)
        made.encoding = pipeline
        return made

    @functools.wraps(QwenImagePipeline.__call__)
    def __call__(
        self, *values: Any, conditioning_latents: torch.Tensor | None = None, **named: Any
    ) -> Any:
        def extend(given: Mapping[str, Any]) -> dict[str, Any]:
            [[grid], *_] = given["img_shapes"]
            patches, grids = append_conditioning(given["hidden_states"], grid, conditioning_latents)
            return {"hidden_states": patches, "img_shapes": grids}

        if conditioning_latents is None:
            return super().__call__(*values, **named)
        with extended_input(self.transformer, extend):
            return super().__call__(*values, **named)

    def encode_prompt(
        self, prompt_embeds: torch.Tensor, prompt_embeds_mask: torch.Tensor | None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return embeddings unchanged: with images they exceed the limit of QwenImagePipeline."""
        mask = prompt_embeds_mask
        return prompt_embeds, None if mask is not None and mask.all() else mask


def encoding_pipeline(pipeline: Any) -> Any:
    """Return the pipeline that encodes the prompts of another; itself by default."""
    return getattr(pipeline, "encoding", pipeline)


THETA = 10000
"""Base of the rotary frequencies (diffusers: QwenImageTransformer2DModel)."""


class QwenEncoders(PipelineEncoders):
    """VAE and text encoder of a base model.

    Args:
        name: The pipeline's class.
        base: Folder of the base model.
        device: Device to encode on.
        max_sequence_length: Tokens of a prompt, without those of images; None for the pipeline's
            default (editing pipelines have no limit).
        dtype: Type that the text encoder computes in.
    """

    def __init__(
        self,
        name: str,
        base: Path,
        device: str,
        max_sequence_length: int | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(name, base, device, dtype, **load_processor(name, base))
        pipeline = self.pipeline
        add_token_types(pipeline.text_encoder)
        self.length = prompt_length(pipeline, pipeline.tokenizer, max_sequence_length, 1024)
        self.most = max_sequence_length

    @torch.inference_mode()
    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels [B, 3, H, W] in [-1, 1] to the posterior's mode, scaled [B, C, h, w]."""
        vae = self.vae
        latents = encode_latents(vae, pixels.to(vae.device))
        check_patches(latents, pixels)
        return latents.cpu()

    def encode_conditioning(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode pixels [B, n, 3, H, W] in [-1, 1] to `conditioning_latents` [B, n, C, h, w].

        Each image is encoded as in encode_images.
        """
        latents = self.encode_images(pixels.flatten(0, 1))
        return {"conditioning_latents": latents.view(*pixels.shape[:2], *latents.shape[1:])}

    @torch.inference_mode()
    def encode_prompts(
        self, prompts: Sequence[str], conditioning: torch.Tensor | None = None
    ) -> dict[str, list[torch.Tensor]]:
        """Encode prompts to `prompt_embeds`, a tensor [T, D] per prompt, without padding.

        Prompts are not batched, so that values do not depend on the lengths of others. A prompt is
        encoded with its images, if `conditioning` has them as pixels [B, n, 3, H, W] in [-1, 1].
        """
        pipeline = self.prompt_pipeline
        if conditioning is not None:
            together = [
                encode_with_images(pipeline, prompt, pixels, self.most)
                for prompt, pixels in zip(prompts, conditioning, strict=True)
            ]
            return {"prompt_embeds": [embeds.float().cpu() for embeds in together]}
        embeds = {
            prompt: pipeline.encode_prompt(prompt, max_sequence_length=self.length)[0][0]
            for prompt in dict.fromkeys(prompts)
        }
        return {"prompt_embeds": [embeds[prompt].float().cpu() for prompt in prompts]}


class QwenObjective(PackedObjective):
    """Flow matching of a transformer that takes patches, their grids and a text mask.

    The patches of conditioning images follow those of the image, in order.
    """

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents, both [B, C, h, w], at timesteps [B]."""
        dtype = next(model.parameters()).dtype
        patches = pack(noisy).to(dtype)
        grid = (1, noisy.shape[-2] // 2, noisy.shape[-1] // 2)
        further, grids = append_conditioning(patches, grid, batch.get("conditioning_latents"))
        velocity: torch.Tensor = model(
            hidden_states=further,
            timestep=timesteps / 1000,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            encoder_hidden_states_mask=batch.get("prompt_embeds_mask"),
            img_shapes=grids,
            return_dict=False,
        )[0]
        return unpack(velocity[:, : patches.shape[1]], noisy.shape)


class QwenImage(PackedFamily):
    """The family of Qwen-Image."""

    small = SMALL

    def empty_model(self, base: Path) -> torch.nn.Module:
        """Build the transformer of config.json on the meta device.

        Only its rotary frequencies have values, since no file holds them.
        """
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
        name = self.pipeline_name(base)
        return QwenEncoders(name, base, device, max_sequence_length, dtype)

    def load_pipeline(self, folder: Path, device: str, **parts: Any) -> Any:
        """Load the pipeline of a folder; a text encoder that sees images knows their tokens."""
        processor = load_processor(self.pipeline_name(folder), folder)
        pipeline = super().load_pipeline(folder, device, **{**processor, **parts})
        if sees_images(pipeline) and pipeline.text_encoder is not None:
            add_token_types(pipeline.text_encoder)
        return pipeline

    def flow_objective(
        self,
        scheduler: FlowMatchEulerDiscreteScheduler,
        settings: Mapping[str, Any] | None,
        config: Mapping[str, Any],
    ) -> QwenObjective:
        """Build the objective for a scheduler."""
        return QwenObjective(scheduler, settings)

    def read_tokens(self, pipeline: Any, tokenizer: str, max_sequence_length: int | None) -> int:
        """Return the limit of a caption's tokens in training; editing pipelines have none."""
        if max_sequence_length is None and sees_images(encoding_pipeline(pipeline)):
            return sys.maxsize
        return super().read_tokens(pipeline, tokenizer, max_sequence_length)

    def count_tokens(self, pipeline: Any, tokenizer: str, prompts: Sequence[str]) -> list[int]:
        """Count the tokens of each prompt with the template around it, without the start."""
        encoding = encoding_pipeline(pipeline)
        if sees_images(encoding):
            return count_text_tokens(encoding, prompts)
        template, start = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
        whole = super().count_tokens(pipeline, tokenizer, [template.format(p) for p in prompts])
        return [count - start for count in whole]

    def sampling_arguments(
        self, pipeline: Any, config: EvaluateConfig, max_sequence_length: int | None
    ) -> dict[str, Any]:
        """Return arguments that guide images away from the empty prompt."""
        found = super().sampling_arguments(pipeline, config, max_sequence_length)
        scale = found.pop("guidance_scale", None)
        if scale is not None:
            found["true_cfg_scale"] = scale
        return found if scale is not None and scale <= 1 else {**found, "negative_prompt": ""}

    def conditioned_pipeline(self, pipeline: Any) -> ConditionedQwenImagePipeline:
        """Build the pipeline that takes conditioning latents, for each kind of base."""
        return ConditionedQwenImagePipeline.around(pipeline)

    @torch.inference_mode()
    def conditioned_arguments(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        pixels: torch.Tensor,
        *,
        negative: str | None,
        max_sequence_length: int | None,
    ) -> dict[str, Any]:
        """Encode prompts and images as QwenEncoders does, in the types of the pipeline."""
        encoding = encoding_pipeline(pipeline)
        length = self.prompt_length(pipeline, max_sequence_length)

        def encode(texts: Sequence[str]) -> list[torch.Tensor]:
            if sees_images(encoding):
                return [
                    encode_with_images(encoding, text, images, max_sequence_length)
                    for text, images in zip(texts, pixels, strict=True)
                ]
            return [encoding.encode_prompt(one, max_sequence_length=length)[0][0] for one in texts]

        asked = {"": prompts} | (
            {} if negative is None else {"negative_": [negative] * len(pixels)}
        )
        found = {}
        for prefix, texts in asked.items():
            embeds = encode(texts)
            masks = [torch.ones(len(one), dtype=torch.long, device=one.device) for one in embeds]
            found[f"{prefix}prompt_embeds"] = pad_sequence(embeds, batch_first=True)
            found[f"{prefix}prompt_embeds_mask"] = pad_sequence(masks, batch_first=True)
        vae = encoding.vae
        held = pixels.flatten(0, 1).to(encoding._execution_device, vae.dtype)
        latents = encode_latents(vae, held)
        by_prompt = latents.view(*pixels.shape[:2], *latents.shape[1:])
        return {**found, "conditioning_latents": by_prompt}

    def encoded_conditioning(
        self, pipeline: Any, tensors: Mapping[str, torch.Tensor], resolution: int
    ) -> dict[str, Any]:
        """Return the latents, which ConditionedQwenImagePipeline takes under their name."""
        return dict(tensors)

    def embedded(
        self, embeds: Mapping[str, torch.Tensor], empty: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Return the embeddings with a mask each, uncut: the cache has cut them."""
        found = super().embedded(embeds, empty)
        masks = {
            f"{name}_mask": torch.ones(tensor.shape[:2], dtype=torch.long, device=tensor.device)
            for name, tensor in found.items()
        }
        return {**found, **masks, "max_sequence_length": 1024}

    def pixels(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents [B, C, h, w], each a single frame, to pixels [B, 3, H, W] in [-1, 1]."""
        mean, std = channel_statistics(vae, latents.device)
        frames = (latents * std + mean).unsqueeze(2)
        decoded: torch.Tensor = vae.decode(frames, return_dict=False)[0]
        return decoded[:, :, 0]


FAMILY = QwenImage(FAMILIES["qwen_image"])
