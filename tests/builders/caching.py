"""Image and text datasets, and a family whose encoders are arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.builders.images import make_image_config

from zerotrain import artifact
from zerotrain.cache import encoding
from zerotrain.cache.reader import Cache, read_cache
from zerotrain.cache.writer import ORPHANS
from zerotrain.config.families import FAMILIES
from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.models.families.conditioning import Conditioning
from zerotrain.models.families.prompt_tokens import TokenLimit, token_limits
from zerotrain.stages import cache_latents as stage
from zerotrain.stages.build_base import BuildSettings, build_base
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset

SIDE = 16


class FakeFamily:
    """A family whose encoders are arithmetic; it counts what it encodes and in which batches."""

    name = "sdxl"
    modality = "image"
    image_parts = ("vae",)
    spec = replace(FAMILIES["sdxl"], text_parts=("text_encoder",))

    def __init__(self) -> None:
        self.image_batches: list[int] = []
        self.prompt_batches: list[list[str]] = []
        self.loads = 0
        self.scale = 1.0

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None,
        dtype: torch.dtype,
        long_captions: str = "truncate",
    ) -> FakeFamily:
        self.loads += 1
        self.long_captions = long_captions
        self.max_sequence_length = max_sequence_length
        return self

    def conditioning(self, base: Path) -> Conditioning | None:
        return None

    def caption_limits(
        self, base: Path, captions: Sequence[str], max_sequence_length: int | None
    ) -> list[TokenLimit]:
        counts = {"tokenizer": [len(caption.split()) for caption in captions]}
        return token_limits({"tokenizer": max_sequence_length or 8}, counts)

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        self.image_batches.append(len(pixels))
        return torch.nn.functional.avg_pool2d(pixels, 4) * self.scale

    def encode_prompts(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        self.prompt_batches.append(list(prompts))
        rows = [list(hashlib.sha256(prompt.encode()).digest()) for prompt in prompts]
        embeds = torch.tensor(rows, dtype=torch.float32)
        return {"prompt_embeds": embeds.view(-1, 4, 8), "pooled": embeds[:, :4]}


def load_fake_family(patch: pytest.MonkeyPatch) -> FakeFamily:
    """Let the stage load a family whose encoders are arithmetic: that family."""
    fake = FakeFamily()
    patch.setattr(stage, "load_family", lambda name: fake)
    return fake


class Run:
    """A folder of images and all that the stage needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shard_size = 2048
        self.train: dict[str, object] = {}
        self.family = "sdxl"
        self.images = folder / "images"
        self.images.mkdir()
        draw = np.random.default_rng(0)
        for number in range(20):
            pixels = draw.integers(0, 256, (30, 24 + number, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(self.images / f"{number:02d}.png")
            (self.images / f"{number:02d}.txt").write_text(f"house {number % 3}")
        self.base(vae="1", text_encoder="1")

    def base(self, **parts: str) -> None:
        """Publish a base model with these digests."""
        with artifact.publish(self.folder / "base", "base") as draft:
            draft.content = {"parts": parts}

        self.prompts: list[str] = []

    def remove(self, *numbers: int) -> dict[Path, bytes]:
        """Remove images and their captions; their contents by their paths."""
        paths = [self.images / f"{n:02d}{suffix}" for n in numbers for suffix in (".png", ".txt")]
        removed = {path: path.read_bytes() for path in paths}
        for path in paths:
            path.unlink()
        return removed

    def config(self, data: dict[str, object], **cache: object) -> RunConfig:
        """The configuration with changes."""
        shown = {"validation": {"prompts": self.prompts}} if self.prompts else {}
        return make_image_config(
            self.images, family=self.family, data={"holdout": 0.3, **data}, train=self.train,
            cache={"shard_size": self.shard_size, **cache}, **shown,
        )  # fmt: skip

    def cache(self, name: str = "cache", data: dict[str, object] | None = None, **cache) -> Path:
        """Prepare the dataset and run the stage."""
        config = self.config(data or {}, **cache)
        prepare_dataset(config.data, self.folder / "dataset")
        output = self.folder / name
        dataset, base = self.folder / "dataset", self.folder / "base"
        cache_latents(CacheSettings.of(config), SIDE, dataset, base, output)
        return output


class StopError(Exception):
    """Ends an encoding."""


def stop_encoding(family: FakeFamily, after: int, patch: pytest.MonkeyPatch) -> None:
    """Let a family encode one image at a time and no more than so many batches."""

    def stopping(pixels: torch.Tensor) -> torch.Tensor:
        if len(family.image_batches) == after:
            raise StopError
        return FakeFamily.encode_images(family, pixels)

    patch.setattr(encoding, "PIXELS_AT_A_TIME", SIDE * SIDE)
    patch.setattr(family, "encode_images", stopping)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, without its orphans."""
    files = [file for file in folder.rglob("*.*") if folder / ORPHANS not in file.parents]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def pixel_run(images: Path, side: int, **data: Any) -> RunConfig:
    """A run of a model to which pixels are latents."""
    raw = {
        "run": "r", "family": "qwen_image", "base": "nano", "vae": "identity",
        "data": {"images": str(images), **data}, "train": {"resolution": side},
        "phases": [{"name": "only", "until": 1, "launch": "torch"}],
    }  # fmt: skip
    return parse_config(raw, "test")


def encode_pixels(config: RunConfig, side: int, folder: Path) -> Cache:
    """The cache of a run, next to its dataset and its base, which is built once."""
    prepare_dataset(config.data, folder / "dataset")
    if not (folder / "base").exists():
        build_base(BuildSettings.of(config), folder / "dataset", folder / "base")
    cache_latents(
        CacheSettings.of(config), side, folder / "dataset", folder / "base", folder / "cache"
    )
    found = read_cache(folder / "cache")
    assert isinstance(found, Cache)
    return found


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> FakeFamily:
    """The family that the stage loads."""
    return load_fake_family(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with twenty images."""
    return Run(tmp_path)
