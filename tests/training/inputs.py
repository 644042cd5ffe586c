"""Bases and caches of the families' nano models, made by the stages that users run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.builders.images import make_pictures
from tests.builders.runs import make_config
from tests.builders.talks import publish_dataset, publish_language, run_config
from tests.families.texts import SUMS

from zerotrain.data.dataset import read_dataset
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
    for number, image in enumerate(make_pictures(SIDE, COUNT)):
        image.save(folder / "images" / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text(CAPTIONS[number % 3])
    config = make_config(
        family=family,
        data={"images": str(folder / "images"), "num_workers": 0},
        train={"resolution": SIDE},
        launch={"num_cpu_threads_per_process": 1},
        validation={"prompts": list(PROMPTS)},
    )
    prepare_dataset(config.data, folder / "dataset")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano_parts, "VAE_STEPS", 3)
        build_base(BuildSettings.of(config), folder / "dataset", folder / "base")
    settings = CacheSettings.of(config)
    cache_latents(settings, SIDE, folder / "dataset", folder / "base", folder / "cache")
    assert len(read_dataset(folder / "dataset").split("train")) == COUNT


def text_inputs(family: str, folder: Path, *, packing: bool = True, holdout: int = 1) -> Path:
    """A nano model and the cache of its dataset; causal rows are packed if they may be."""
    publish_language(family, folder / "base")
    dataset = publish_dataset(folder / "data", TALKS, holdout=holdout)
    config = run_config(family, packing=packing and family == "causal_lm")
    cache_latents(CacheSettings.of(config), 32, dataset, folder / "base", folder / "cache")
    return folder


def cache_of(**tensors: torch.Tensor) -> Any:
    """A cache of samples that are all the same."""
    sample = {"latents": torch.zeros(4, 8, 8), **tensors}
    entries = [SimpleNamespace(split="train", flipped=None)] * COUNT
    return SimpleNamespace(entries=entries, sample=lambda number, **how: sample)
