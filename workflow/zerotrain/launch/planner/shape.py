"""Size of a micro batch, and the values derived from it and the architecture; without torch.

Text lengths are those to which the families' own pipelines pad; cached embeddings have the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.config.families import FAMILIES, PRESETS
from zerotrain.launch.planner.architecture import Architecture
from zerotrain.models.families.conditioning import IMAGE_EMBEDDER, read_pipeline, takes_fill

if TYPE_CHECKING:
    from zerotrain.config.stage_settings import PlannedRun

CLIP_TOKENS = 77
SEQUENCE_LENGTH = 2048
TEXT_PATCH = 28
"""Pixels per side of one Qwen2.5-VL token: 2 x 2 patches of 14."""
SIDE_IN_TEXT = 384
"""Side of an image in QwenImageEditPlusPipeline's text encoder (CONDITION_IMAGE_SIZE)."""
REDUX_TOKENS = 729
"""Tokens of a FLUX.1 Redux image: patches of 14 pixels of SigLIP's 384 x 384."""
SIZE_NUMBERS = 6
"""SDXL's original size, crop and target size, two numbers each."""


@dataclass(frozen=True)
class Shape:
    """Size of a micro batch.

    Attributes:
        batch: Samples.
        resolution: Side of square images, or of a square of the same area, in pixels; image
            families only.
        tokens: Length of the text embeddings (default: the family's padded length), or of a
            language model's sequences (default: SEQUENCE_LENGTH). It applies to both source and
            target of a seq2seq model.
        max_sequence_length: The value of config.cache, which replaces the family's.
        conditioning_images: Conditioning images of each sample, in addition to its own image.
        image_text_tokens: Tokens that these images add to a sample's caption.
    """

    batch: int
    resolution: int = 1024
    tokens: int | None = None
    max_sequence_length: int | None = None
    conditioning_images: int = 0
    image_text_tokens: int = 0

    @classmethod
    def of(cls, config: PlannedRun, base: str, batch: int, size: int) -> Shape:
        """Return the shape of a run's micro batch.

        Args:
            config: The run's configuration. A column of conditioning images counts as one image.
            base: Its base, or the folder of the base artifact.
            batch: Samples.
            size: Resolution, or tokens of a row of text.
        """
        length = config.cache.max_sequence_length
        if config.is_text:
            return cls(batch, tokens=size, max_sequence_length=length)
        count = len(config.data.conditioning_folders or config.data.conditioning_columns or ())
        side = _side_in_text(base, size) if config.family == "qwen_image" else 0
        in_text = count * round(side / TEXT_PATCH) ** 2
        if config.family == "flux" and _reads_as_text(base):
            count, in_text = 0, count * REDUX_TOKENS
        return cls(
            batch,
            resolution=size,
            max_sequence_length=length,
            conditioning_images=count,
            image_text_tokens=in_text,
        )


def _reads_as_text(base: str) -> bool:
    """Return whether a Flux base is FLUX.1 Redux, which reads conditioning images only as text."""
    return (
        f":{IMAGE_EMBEDDER}/" in base or Path(base).expanduser().joinpath(IMAGE_EMBEDDER).is_dir()
    )


def _side_in_text(base: str, resolution: int) -> int:
    """Return the side in pixels of a conditioning image in Qwen-Image's text encoder; 0: none."""
    if base in PRESETS:
        return 0  # their processors turn an image into only a few tokens
    path = Path(base).expanduser()
    named = read_pipeline(path) or "" if (path / "model_index.json").is_file() else ""
    if named == "QwenImageEditPipeline" or base.endswith("Image-Edit"):
        return resolution
    return SIDE_IN_TEXT if named == "QwenImageEditPlusPipeline" or "Image-Edit-" in base else 0


def text_tokens(architecture: Architecture, shape: Shape) -> int:
    """Return the text tokens of a sample."""
    if shape.tokens is not None:
        return shape.tokens
    spec = FAMILIES[architecture.family]
    if spec.modality == "text":
        longest = architecture.trained.config.get("max_position_embeddings", SEQUENCE_LENGTH)
        return min(SEQUENCE_LENGTH, int(longest)) if spec.encoder_decoder else SEQUENCE_LENGTH
    tokens = shape.image_text_tokens
    if spec.clip_tokens:
        clip = architecture.parts.get("text_encoder")
        tokens += int(clip.config["max_position_embeddings"]) if clip else CLIP_TOKENS
    return tokens + (shape.max_sequence_length or spec.prompt.default if spec.prompt else 0)


def prompt_shapes(architecture: Architecture, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of an image's caption, by its name in the batch."""
    config = architecture.trained.config
    pooled = config.get("pooled_projection_dim")
    if "addition_time_embed_dim" in config:  # SDXL's U-Net embeds them with the sizes
        sizes = SIZE_NUMBERS * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - sizes
    width = config[FAMILIES[architecture.family].text_width]
    embeds = {"prompt_embeds": (text_tokens(architecture, shape), width)}
    return {**embeds, "pooled_prompt_embeds": (pooled,)} if pooled else {**embeds}


def pixels_per_latent(architecture: Architecture) -> int:
    """Return the pixels per side of one latent, according to the autoencoder's configuration."""
    if "vae" not in architecture.parts:
        return 8
    config = architecture.parts["vae"].config
    steps = config.get("block_out_channels") or config["dim_mult"]
    return int(2 ** (len(steps) - 1))


def adds_channels(architecture: Architecture) -> bool:
    """Return whether conditioning images add channels, as in FLUX.1 Fill, and not tokens."""
    return architecture.family == "flux" and takes_fill(architecture.trained.config)
