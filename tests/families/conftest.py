"""Small models for the tests of families."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from zerotrain.models.families import nano as nano_parts
from zerotrain.models.families import sd3_nano, sdxl_nano

CAPTIONS = ("a red house", "a blue house", "a green boat")


def pictures(side: int, count: int = 8) -> list[Image.Image]:
    """Images of random colours, two to an image."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count):
        pixels = np.empty((side, side, 3), dtype=np.uint8)
        pixels[: side // 2], pixels[side // 2 :] = draw.integers(0, 256, (2, 3), dtype=np.uint8)
        made.append(Image.fromarray(pixels))
    return made


def drawn(pipeline: DiffusionPipeline, **arguments: object) -> bytes:
    """Pixels of the 16 px image that a user's own call draws: a red house, seed 7, guidance 3."""
    image = pipeline(
        "a red house",
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(7),
        **arguments,
    ).images[0]
    pixels: bytes = image.tobytes()
    return pixels


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano model for 16 px images whose autoencoder is fitted for a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano_parts, "VAE_STEPS", 3)
        folder = tmp_path_factory.mktemp("nano") / "base"
        sdxl_nano.SMALL.build(CAPTIONS, pictures(16), 0, folder)
    return folder


@pytest.fixture(scope="session")
def nano_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano SD3, likewise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano_parts, "VAE_STEPS", 3)
        folder = tmp_path_factory.mktemp("nano_sd3") / "base"
        sd3_nano.SMALL.build(CAPTIONS, pictures(16), 0, folder)
    return folder
