"""Pipelines of diffusers, imported and loaded without noise in the log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from zerotrain.families.lora import apply_adapter

if TYPE_CHECKING:
    import torch


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

    An adapter beside the parts is applied to the denoiser.
    """
    # Bars of the libraries would fill a log with one line per file.
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    pipeline = pipeline_class(name).from_pretrained(
        folder, dtype=dtype, use_safetensors=True, **parts
    )
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    if denoiser is not None:
        apply_adapter(denoiser, folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
