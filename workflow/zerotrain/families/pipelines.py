"""Pipelines of diffusers, imported and loaded without noise in the log."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from zerotrain.errors import PipelineError
from zerotrain.families import adapters


def pipeline_class(name: str) -> Any:
    """A pipeline's class by its name in diffusers."""
    verbosity = transformers_logging.get_verbosity()
    # The import warns that image processors, which are not used here, would want torchvision.
    transformers_logging.set_verbosity_error()
    found = getattr(diffusers, name)
    transformers_logging.set_verbosity(verbosity)
    return found


def load_pipeline(name: str, folder: Path, dtype: torch.dtype, **parts: Any) -> Any:
    """Load a pipeline from safetensors alone; a part given as None stays on disk.

    A part that the folder's model_index.json has as null is None, which diffusers takes for some
    parts only if it is told so. An adapter beside the parts is applied to the denoiser.
    """
    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    # Bars of the libraries would fill a log with one line per file.
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    pipeline = pipeline_class(name).from_pretrained(
        folder, dtype=dtype, use_safetensors=True, **{**absent, **parts}
    )
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    if denoiser is not None:
        adapters.apply(denoiser, folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.inference_mode()
def latents_of(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Pixels [B, 3, H, W] in [-1, 1] to scaled latents float32 [B, C, h, w]: the posterior's mode.

    It is the inverse of what a pipeline with an AutoencoderKL does before it decodes.
    """
    latents = vae.encode(pixels.to(vae.device)).latent_dist.mode()
    scaled: torch.Tensor = (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
    return scaled.float().cpu()


def prompt_length(pipeline: Any, tokenizer: Any, asked: int | None, most: int) -> int:
    """Tokens that a prompt is cut or filled to, in encoding captions and in sampling alike.

    Args:
        pipeline: The pipeline, whose own default counts where nothing is asked for.
        tokenizer: The one that the length is for; None where the base has none.
        asked: cache.max_sequence_length.
        most: The pipeline's own limit.

    Raises:
        PipelineError: more is asked for than tokenizer and pipeline take.
    """
    if tokenizer is not None:
        most = min(most, tokenizer.model_max_length)
    if asked is not None and asked > most:
        raise PipelineError(
            f"cache.max_sequence_length: {asked}, and the base takes at most {most} tokens",
            hint=f"set it to {most} or less, or remove it",
        )
    default = inspect.signature(type(pipeline).__call__).parameters["max_sequence_length"].default
    return asked or min(default, most)
