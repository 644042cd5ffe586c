"""What the cache stage stores of a sample, and what it loads to make it."""

from __future__ import annotations

from zerotrain.families import LANGUAGE_MODELS
from zerotrain.plan.architecture import Architecture
from zerotrain.plan.forward import SIZE_NUMBERS, Shape, pixels_per_latent, text_tokens
from zerotrain.plan.model import parameters_of

FP32 = 4
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def cached_bytes(architecture: Architecture, shape: Shape, dtype: str) -> tuple[int, int]:
    """Bytes of one sample's latents and of one caption's embeddings; language models cache none.

    Args:
        architecture: The model.
        shape: Resolution and tokens; the batch does not count.
        dtype: The cache's: fp32, bf16 or fp16.
    """
    if architecture.family in LANGUAGE_MODELS:
        return 0, 0
    config = architecture.trained.config
    side = shape.resolution // pixels_per_latent(architecture)
    # A transformer that takes patches of 2 x 2 has four times the channels of its latents.
    channels = config["in_channels"] // (4 if architecture.family in ("qwen_image", "flux") else 1)
    if architecture.family == "sdxl":
        width = config["cross_attention_dim"]
        sizes = SIZE_NUMBERS * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - sizes
    else:
        width, pooled = config["joint_attention_dim"], config.get("pooled_projection_dim", 0)
    text = text_tokens(architecture, shape) * width + pooled
    return BYTES[dtype] * channels * side**2, BYTES[dtype] * text


def encoder_bytes(architecture: Architecture, dtype: str) -> dict[str, int]:
    """Bytes of each part that the cache stage loads; training loads none of them.

    On the device are the autoencoder or the text encoders, never both (zerotrain/families/
    pipelines.py: PipelineEncoders); the host loads all.

    Args:
        architecture: The model.
        dtype: Type of the text encoders: the cache's, on a CPU fp32. The autoencoder has fp32.
    """
    return {
        name: (FP32 if name == "vae" else BYTES[dtype]) * parameters_of(part, architecture.source)
        for name, part in architecture.encoders.items()
    }
