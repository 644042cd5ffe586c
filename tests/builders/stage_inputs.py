"""Small inputs of every stage, made from seeds, each made once for all cases that read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tests.builders.images import make_image_config
from tests.builders.phases import make_tiny_phase
from tests.builders.runs import make_config
from tests.training.conftest import write_base, write_cache
from tests.training.inputs import text_inputs

from zerotrain import artifact
from zerotrain.artifact import link_or_copy
from zerotrain.config.run import RunConfig
from zerotrain.launch.files import write_launch_files, write_run_yaml
from zerotrain.models.families import autoencoders
from zerotrain.stages import train_phase as train_module
from zerotrain.stages.build_base import BuildSettings, build_base
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.training import rank

IMAGES = ("sdxl", "sd3", "flux", "qwen_image")
TEXTS = ("causal_lm", "seq2seq_lm")
FAMILIES = (*IMAGES, *TEXTS)
SIDE, MAX_LENGTH, STEPS = 16, 32, 3
CAPTIONS = ("a red house", "a blue house", "a green boat")
"""No two pairs of letters that end a word are equally frequent: of such a tie, the library that
trains the tokenizer makes either first."""
SIZES = ((16, 16), (40, 24), (24, 40), (17, 16), (16, 16), (32, 16), (16, 48), (20, 20))
"""Widths and heights."""


def write_pixmap(file: Path, size: tuple[int, int], seed: int) -> None:
    """Write noise as a PPM file: its bytes, of which samples have digests, need no library."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file.write_bytes(b"P6\n%d %d\n255\n" % size + pixels.tobytes())


def write_images(folder: Path, sizes: Sequence[tuple[int, int]] = SIZES) -> Path:
    """Write images of these sizes, and their captions, which take turns, into a new folder."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        write_pixmap(folder / f"{number}.ppm", size, number)
        (folder / f"{number}.txt").write_text(CAPTIONS[number % len(CAPTIONS)])
    return folder


def write_rows(file: Path) -> Path:
    """Write rows of sums as JSON lines."""
    sums = [(a, b) for a in range(1, 5) for b in range(1, 4)]
    rows = [{"instruction": f"{a}+{b}=", "input": "", "output": str(a + b)} for a, b in sums]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


class StageInputs:
    """Datasets, bases, caches and a training in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bases: dict[str, Path] = {}
        self._trained: dict[str, Path] = {}

    @cached_property
    def images(self) -> Path:
        """A folder of images and captions."""
        return write_images(self.folder / "images")

    @cached_property
    def rows(self) -> Path:
        """A file of questions and answers."""
        return write_rows(self.folder / "rows.jsonl")

    def config(self, family: str) -> RunConfig:
        """A run of the family's nano model."""
        if family in IMAGES:
            data: dict[str, Any] = {"holdout": 0.3, "random_flip": family == "sdxl"}
            if family == "sdxl":
                data["aspect_buckets"] = {"alignment": 8}
            return make_image_config(
                self.images, family=family, data=data, cache={"dtype": "fp32"},
                validation={"prompts": ["boat"]},
                evaluate={"images_per_prompt": 1, "num_inference_steps": 2, "batch_size": 4,
                          "prompts": list(CAPTIONS)},
            )  # fmt: skip
        return make_config(
            family=family, launch={"num_cpu_threads_per_process": 1},
            data={"source": "text", "path": str(self.rows), "holdout": 0.3},
            train={"max_length": MAX_LENGTH, "packing": family == "causal_lm"},
            evaluate={"max_samples": 3, "max_new_tokens": 8, "prompts": ["1+1="]},
        )  # fmt: skip

    def size(self, family: str) -> int:
        """The number that names the family's cache."""
        return SIDE if family in IMAGES else MAX_LENGTH

    def base(self, family: str) -> Path:
        """The folder of the family's base, next to its dataset.

        The digests of its parts are made up: those of fitted weights differ between machines, and
        every key of a cache depends on them.
        """
        if family not in self._bases:
            folder = self.folder / family
            config = self.config(family)
            prepare_dataset(config.data, folder / "dataset")
            with patch.object(autoencoders, "VAE_STEPS", 2):
                build_base(BuildSettings.of(config), folder / "dataset", folder / "built")
            built = artifact.read(folder / "built", "base")
            parts = {name: f"digest of {name}" for name in built.content["parts"]}
            publish_copy(built, folder / "base", "base", {**built.content, "parts": parts})
            self._bases[family] = folder / "base"
        return self._bases[family]

    def dataset(self, family: str) -> Path:
        """The folder of the family's dataset."""
        return self.base(family).parent / "dataset"

    def cache(self, family: str, folder: Path) -> Path:
        """Encode the family's dataset into a folder."""
        settings = CacheSettings.of(self.config(family))
        cache_latents(settings, self.size(family), self.dataset(family), self.base(family), folder)
        return folder

    def training(self, family: str) -> Path:
        """The folder of a phase of a few steps in plain PyTorch: `base`, `cache`, `checkpoint`."""
        if family not in self._trained:
            folder = self.folder / f"trained-{family}"
            values: dict[str, Any] = {"family": family}
            if family in TEXTS:
                text_inputs(family, folder, packing=False)
                rows = artifact.read(folder / "cache", "cache").content["epoch_size"] // 2
                values |= {"objective": {}, "epoch_size": rows}
            else:
                folder.mkdir()
                write_base(folder / "base", (9, 15))
                write_cache(folder / "cache")
            train(folder, values)
            self._trained[family] = folder
        return self._trained[family]


def publish_copy(
    source: artifact.Artifact, folder: Path, kind: str, content: dict[str, Any]
) -> None:
    """Publish the files of an artifact under another kind or content."""
    with artifact.publish(folder, kind) as draft:
        for name in source.files:
            (draft.folder / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(source.path(name), draft.folder / name)
        draft.content = content


def train(folder: Path, values: dict[str, Any]) -> None:
    """Call the stage, whose training process is this one, on the inputs of a folder.

    AdamW's epsilon is far from 0: a gradient that is 0 except for rounding must not become a step.
    """
    phase = make_tiny_phase("plain", "torch", STEPS).with_values(adam_epsilon=1e-3, **values)
    with artifact.publish(folder / "launch", "launch") as draft:
        write_run_yaml(phase, draft.folder / "run.yaml")
        write_launch_files(phase, draft.folder, folder / "launch")

    def here(phase: Any, launch: Path, base: Path, cache: Path, *more: Any) -> int:
        start, resume, progress = more
        assert rank.run(launch, base, cache, progress, start, resume)
        return 0

    with patch.object(train_module, "_launch", here):
        code = train_module.train_phase(
            folder / "launch", folder / "base", folder / "cache", None, folder / "progress",
            folder / "checkpoint",
        )  # fmt: skip
    assert code == 0
