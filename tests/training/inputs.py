"""Bases and caches of the families' nano models, made by the stages that users run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image, ImageOps
from tests.builders.images import make_image_config, prepare_inputs, write_pictures
from tests.builders.talks import publish_dataset, publish_language, run_config
from tests.families.texts import SUMS

from zerotrain.artifact.columns import Columns
from zerotrain.cache.layout import Entry
from zerotrain.cache.reader import read_cache, stacked
from zerotrain.config.training import TrainConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.models.families import load_family
from zerotrain.stages.cache_latents import CacheSettings, cache_latents

SIDE, COUNT = 16, 12
"""Of the images."""
CAPTIONS = ("a red house", "boat", "a green house, a blue boat")
PROMPTS = ("boat", "two pink houses")
"""Of validations: a caption and one that is none."""
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ["to_q", "to_k", "to_v"]}
TALKS = [tuple(m.content for m in one.messages) for one in SUMS]


def write_image_inputs(
    family: str,
    folder: Path,
    sizes: Sequence[tuple[int, int]] = ((SIDE, SIDE),),
    *,
    conditioned: bool = False,
    **data: Any,
) -> None:
    """A nano model of images and their cache; the images have these sizes in turn.

    If `conditioned`, each has a conditioning image of twice its size and other colours, and there
    are no prompts of validations.
    """
    images = write_pictures(folder / "images", CAPTIONS, SIDE, COUNT)
    if conditioned:
        (folder / "before").mkdir()
        data |= {"conditioning_images": str(folder / "before")}
    for number, file in enumerate(sorted(images.glob("*.png"))):
        image = Image.open(file).resize(sizes[number % len(sizes)])
        image.save(file)
        if conditioned:
            before = ImageOps.invert(image).resize((2 * image.width, 2 * image.height))
            before.save(folder / "before" / file.name)
    validation = {} if conditioned else {"validation": {"prompts": list(PROMPTS)}}
    config = make_image_config(images, family=family, data=data, **validation)
    prepare_inputs(config, folder, steps=3)
    assert len(read_dataset(folder / "dataset").split("train")) == COUNT


def image_values(family: str) -> dict[str, Any]:
    """What a phase of a nano model of images has of its own."""
    objective = TrainConfig().objective(family)
    return {"family": family, "objective": objective, "resolution": SIDE, "epoch_size": COUNT}


@torch.no_grad()
def answer_samples(family: str, inputs: Path, weights: Path, model: torch.nn.Module) -> Any:
    """The model's velocities for three cached samples, without noise, at timestep 500."""
    cache = read_cache(inputs / "cache")
    batch = stacked([cache.sample(i) for i in range(3)], torch.device("cpu"))
    objective = load_family(family).objective(weights)
    return objective.predict(model, batch["latents"], torch.full((3,), 500.0), batch)


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
    side = (64, 64)
    entry = Entry("a.png", "image", "caption", "latents", "text", side, (0, 0), side, "train")
    return SimpleNamespace(
        entries=Columns.of(Entry, [entry] * COUNT),
        sample=lambda number, **how: sample,
        latents_shape=lambda number: tuple(sample["latents"].shape),
        is_mirrored=lambda number: False,
        variants=lambda number: (1, 1),
    )
