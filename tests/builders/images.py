"""Nano image models, the images that they are fitted to, runs on those, and what they draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tests.builders.runs import make_config

from zerotrain import artifact
from zerotrain.config.run import RunConfig
from zerotrain.models.families import autoencoders, load_family
from zerotrain.models.families.diffusion import DiffusionFamily
from zerotrain.models.families.nano import build_pipeline
from zerotrain.models.families.pipelines import place_pipeline
from zerotrain.stages.build_base import BuildSettings, build_base
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset

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


def write_pictures(folder: Path, captions: Sequence[str], side: int = 16, count: int = 8) -> Path:
    """Write such images and their captions, which take turns, into a new folder."""
    folder.mkdir()
    for number, image in enumerate(make_pictures(side, count)):
        image.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(captions[number % len(captions)])
    return folder


def make_image_config(
    images: Path, *, data: Mapping[str, Any] = {}, train: Mapping[str, Any] = {}, **sections: Any
) -> RunConfig:
    """A run on the images of a folder, of 16 px and in this process."""
    return make_config(
        data={"images": str(images), "num_workers": 0, **data}, train={"resolution": 16, **train},
        launch={"num_cpu_threads_per_process": 1}, **sections,
    )  # fmt: skip


def prepare_inputs(config: RunConfig, folder: Path, size: int = 16, *, steps: int = 2) -> None:
    """Make dataset, base and cache by their stages; few steps fit the autoencoder."""
    dataset, base = folder / "dataset", folder / "base"
    prepare_dataset(config.data, dataset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoencoders, "VAE_STEPS", steps)
        build_base(BuildSettings.of(config), dataset, base)
    cache_latents(CacheSettings.of(config), size, dataset, base, folder / "cache")


def build_nano(
    family: str, folder: Path, *, side: int = 16, steps: int = 3, seed: int = 0, **options: Any
) -> Path:
    """Build a family's nano model into a folder; few steps fit its autoencoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoencoders, "VAE_STEPS", steps)
        build_pipeline(load_family(family), CAPTIONS, make_pictures(side), seed, folder, **options)
    return folder


def publish_nano(family: str, folder: Path, **options: Any) -> Path:
    """Publish a family's nano model as a base."""
    with artifact.publish(folder, "base") as draft:
        build_nano(family, draft.folder, **options)
        draft.content = {"family": family, "base": "nano", "commit": None, "parts": {}}
    return folder


def draw_of(
    family: DiffusionFamily, weights: Path, *values: Any, device: str = "cpu", **options: Any
) -> list[Image.Image]:
    """Images that a family draws with the pipeline of a weights folder."""
    pipeline = place_pipeline(family.load_pipeline(weights, device), device)
    return family.draw(pipeline, *values, **options)


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
