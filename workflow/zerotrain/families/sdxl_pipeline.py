"""Diffusers' SDXL pipeline, imported and loaded without noise in the log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from zerotrain.families.lora import apply_adapter

if TYPE_CHECKING:
    import torch


def pipeline_class() -> Any:
    """The class StableDiffusionXLPipeline."""
    verbosity = transformers_logging.get_verbosity()
    # The import warns that image processors, which are not used here, would want torchvision.
    transformers_logging.set_verbosity_error()
    from diffusers import StableDiffusionXLPipeline

    transformers_logging.set_verbosity(verbosity)
    return StableDiffusionXLPipeline


def load_pipeline(folder: Path, dtype: torch.dtype, **parts: None) -> Any:
    """Load a pipeline from safetensors alone; a part given as None stays on disk.

    An adapter beside the parts is applied to the U-Net.
    """
    # Bars of the libraries would fill a log with one line per file.
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    pipeline = pipeline_class().from_pretrained(
        folder, dtype=dtype, use_safetensors=True, add_watermarker=False, **parts
    )
    if pipeline.unet is not None:
        apply_adapter(pipeline.unet, folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
