"""Encoding of images and prompts for Qwen-Image, in caching and in sampling.

The text encoder of Qwen-Image-Edit, Qwen2.5-VL, sees the conditioning images, too. The pipelines of
diffusers encode them (QwenImageEditPipeline, QwenImageEditPlusPipeline), with two differences.
Pillow scales the images: diffusers would load a processor with a part for videos, which needs
torchvision, and torchvision rounds pixels differently. The text encoder gets
`mm_token_type_ids`, without which transformers 5 gives image tokens the positions of text:
diffusers 0.42 does not pass it on (https://github.com/huggingface/diffusers/issues/14194).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2Tokenizer, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from zerotrain.errors import PipelineError
from zerotrain.models.families.pipelines import channel_statistics
from zerotrain.models.families.prompt_tokens import count_tokens
from zerotrain.models.pretrained import from_pretrained

PLAIN = "QwenImagePipeline"
EDIT = "QwenImageEditPipeline"
EDIT_PLUS = "QwenImageEditPlusPipeline"
HUB = {EDIT: "Qwen-Image-Edit", EDIT_PLUS: "Qwen-Image-Edit-2509"}
"""The first base of each kind for editing, on the hub."""
PROCESSOR = "processor"
PROMPT_IMAGE_SIDE = 384
"""Side in pixels of the square images that QwenImageEditPlusPipeline gives the text encoder; others
have the same area (CONDITION_IMAGE_SIZE). QwenImageEditPipeline gives it those of the autoencoder.
"""


class ImageTextProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """The processor of Qwen2.5-VL for text and images, without the part for videos."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)


def load_processor(name: str, folder: Path) -> dict[str, Any]:
    """Load the processor of a base or weights folder, by part name; none for a plain pipeline.

    Args:
        name: The pipeline's class.
        folder: The folder.

    Raises:
        PipelineError: the pipeline needs one, and the folder has none.
    """
    if name == PLAIN:
        return {}
    place = folder / PROCESSOR
    if not place.is_dir():
        raise PipelineError(
            f"{folder}: a {name} needs the part {PROCESSOR}, which is missing",
            hint=f"copy the folder {PROCESSOR} of Qwen/{HUB[name]} to it",
        )
    images = from_pretrained(Qwen2VLImageProcessorPil, place)
    return {PROCESSOR: ImageTextProcessor(images, from_pretrained(Qwen2Tokenizer, place))}


def add_token_types(text_encoder: Any) -> None:
    """Make a Qwen2.5-VL identify image tokens in each call that does not name them."""

    def add(model: Any, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if named.get("image_grid_thw") is not None and "mm_token_type_ids" not in named:
            types = (named["input_ids"] == model.config.image_token_id).int()
            named = {**named, "mm_token_type_ids": types}
        return values, named

    text_encoder.register_forward_pre_hook(add, with_kwargs=True)


def sees_images(pipeline: Any) -> bool:
    """Return whether a pipeline's text encoder sees the conditioning images."""
    return type(pipeline).__name__ in (EDIT, EDIT_PLUS)


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode pixels [B, 3, H, W] in [-1, 1] to scaled latents float32 [B, C, h, w].

    They are the posterior's mode, on the pixels' device. The scaling inverts what a pipeline does
    before it decodes.
    """
    latents: torch.Tensor = vae.encode(pixels.unsqueeze(2)).latent_dist.mode().squeeze(2)
    mean, std = channel_statistics(vae, latents.device)
    scaled: torch.Tensor = (latents - mean) / std
    return scaled.float()


def encode_with_images(
    pipeline: Any, prompt: str, pixels: torch.Tensor, most: int | None
) -> torch.Tensor:
    """Encode a prompt together with its conditioning images.

    Args:
        pipeline: A QwenImageEditPipeline or QwenImageEditPlusPipeline.
        prompt: The prompt.
        pixels: Float32 [n, 3, H, W] in [-1, 1].
        most: Text tokens to keep, without those of the images; None keeps all.

    Returns:
        The embeddings [T, D] of image and text tokens, in the text encoder's type.
    """
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    images: Any = to_images(pixels)
    if type(pipeline).__name__ == EDIT_PLUS:
        ratio = pixels.shape[-1] / pixels.shape[-2]
        width, height = calculate_dimensions(PROMPT_IMAGE_SIDE**2, ratio)
        images = [pipeline.image_processor.resize(image, height, width) for image in images]
    embeds: torch.Tensor = pipeline.encode_prompt(prompt, image=images)[0][0]
    excess = 0 if most is None else count_text_tokens(pipeline, [prompt])[0] - most
    return embeds[: len(embeds) - max(0, excess)]


def count_text_tokens(pipeline: Any, prompts: Sequence[str]) -> list[int]:
    """Count the tokens of each prompt and of the template after it, without images."""
    ending = pipeline.prompt_template_encode.split("{}")[1]
    tokenizer = pipeline.tokenizer
    return count_tokens(tokenizer, [prompt + ending for prompt in prompts])


def to_images(pixels: torch.Tensor) -> list[Image.Image]:
    """Convert pixels [n, 3, H, W] in [-1, 1] to n RGB images, exact for pixels of 8 bits."""
    values = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(one.permute(1, 2, 0).contiguous().cpu().numpy()) for one in values]
