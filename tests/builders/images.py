"""Nano image models, the images and captions that they are fitted to, and what they draw."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from zerotrain import artifact
from zerotrain.models.families import nano

CAPTIONS = ("a red house", "a blue house", "a green boat")


def make_pictures(side: int, count: int = 8) -> list[Image.Image]:
    """Images of random colours, two to an image."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count):
        pixels = np.empty((side, side, 3), dtype=np.uint8)
        pixels[: side // 2], pixels[side // 2 :] = draw.integers(0, 256, (2, 3), dtype=np.uint8)
        made.append(Image.fromarray(pixels))
    return made


def build_nano(
    small: Any, folder: Path, *, side: int = 16, steps: int = 3, seed: int = 0, **options: Any
) -> Path:
    """Build a family's nano model into a folder; few steps fit its autoencoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano, "VAE_STEPS", steps)
        small.build(CAPTIONS, make_pictures(side), seed, folder, **options)
    return folder


def publish_nano(family: str, folder: Path, **options: Any) -> Path:
    """Publish a family's nano model as a base."""
    module = importlib.import_module(f"zerotrain.models.families.{family}_nano")
    with artifact.publish(folder, "base") as draft:
        build_nano(module.SMALL, draft.folder, **options)
        draft.content = {"family": family, "base": "nano", "commit": None, "parts": {}}
    return folder


def draw_house(pipeline: DiffusionPipeline, **arguments: object) -> bytes:
    """What `draw_image` draws with guidance 3."""
    return draw_image(pipeline, guidance_scale=3.0, **arguments)


def draw_image(
    pipeline: DiffusionPipeline, prompt: str = "a red house", seed: int = 7, **arguments: object
) -> bytes:
    """Pixels of the 16 px image that a user's own call draws."""
    image = pipeline(
        prompt=prompt,
        height=16,
        width=16,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(seed),
        **arguments,
    ).images[0]
    pixels: bytes = image.tobytes()
    return pixels
