"""Bases and caches of the families' nano models, made by the stages that users run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cache.test_tokens import publish_dataset, run_config
from tests.families.conftest import pictures
from tests.families.texts import SUMS, build

from zerotrain import artifact
from zerotrain.artifact import file_sha256
from zerotrain.config.read import parse_config
from zerotrain.data.dataset import read_dataset
from zerotrain.models.base import part_digests
from zerotrain.models.families import nano as nano_parts
from zerotrain.stages.build_base import BuildSettings, build_base
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset

SIDE, COUNT = 16, 12
"""Of the images."""
CAPTIONS = ("a red house", "boat", "a green house, a blue boat")
PROMPTS = ("boat", "two pink houses")
"""Of validations: a caption and one that is none."""
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ["to_q", "to_k", "to_v"]}
TALKS = [tuple(m.content for m in one.messages) for one in SUMS]


def write_image_inputs(family: str, folder: Path) -> None:
    """A nano model of images and their cache."""
    (folder / "images").mkdir()
    for number, image in enumerate(pictures(SIDE, COUNT)):
        image.save(folder / "images" / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text(CAPTIONS[number % 3])
    raw = {
        "run": "r",
        "family": family,
        "base": "nano",
        "data": {"images": str(folder / "images"), "num_workers": 0},
        "train": {"resolution": SIDE},
        "launch": {"num_cpu_threads_per_process": 1},
        "validation": {"prompts": list(PROMPTS)},
        "phases": [{"name": "p", "until": 1}],
    }
    config = parse_config(raw, "test")
    prepare_dataset(config.data, folder / "dataset")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano_parts, "VAE_STEPS", 3)
        build_base(BuildSettings.of(config), folder / "dataset", folder / "base")
    settings = CacheSettings.of(config)
    cache_latents(settings, SIDE, folder / "dataset", folder / "base", folder / "cache")
    assert len(read_dataset(folder / "dataset").split("train")) == COUNT


def text_inputs(family: str, folder: Path, *, packing: bool = True, holdout: int = 1) -> Path:
    """A nano model and the cache of its dataset; causal rows are packed if they may be."""
    with artifact.publish(folder / "base", "base") as draft:
        build(family, draft.folder)
        draft.known = {p.name: file_sha256(p) for p in draft.folder.iterdir()}
        draft.content = {"family": family, "parts": part_digests(draft.known)}
    dataset = publish_dataset(folder / "data", TALKS, holdout=holdout)
    config = run_config(family, packing=packing and family == "causal_lm")
    cache_latents(CacheSettings.of(config), 32, dataset, folder / "base", folder / "cache")
    return folder
