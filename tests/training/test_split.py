"""The two commands of a split training are two rules: one needs encoders, one the denoiser."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.builders.images import make_image_config, prepare_inputs, write_pictures
from tests.builders.runs import make_config
from tests.training.conftest import Training

from zerotrain import artifact
from zerotrain.config.families import FAMILIES, LANGUAGE_MODELS
from zerotrain.config.run import RunConfig
from zerotrain.config.training import TrainConfig
from zerotrain.models.base import in_part
from zerotrain.models.families import load_family
from zerotrain.stages.cache_latents import CacheSettings, cache_latents

SIDE, COUNT = 16, 4
LORA = {"rank": 2, "alpha": 2.0, "dropout": 0.0, "target_modules": ["to_q"]}


def spoil(base: Path, wrong: Callable[[str], bool]) -> list[str]:
    """Put in the place of weights what is none, as if it were the base's; which files."""
    found = [str(path.relative_to(base)) for path in sorted(base.rglob("*.safetensors"))]
    spoilt = [name for name in found if wrong(name)]
    manifest = json.loads((base / artifact.MANIFEST).read_text())
    for name in spoilt:
        (base / name).write_bytes(b"no weights")
        digest = hashlib.sha256(b"no weights").hexdigest()
        manifest["files"][name] = {"sha256": digest, "bytes": len(b"no weights")}
    (base / artifact.MANIFEST).write_text(json.dumps(manifest))
    return spoilt


def configuration(family: str, folder: Path) -> RunConfig:
    """A run of a nano model over a few samples."""
    if family not in LANGUAGE_MODELS:
        images = write_pictures(folder / "images", ["a boat"], SIDE, COUNT)
        return make_image_config(images, family=family)
    rows = [{"instruction": f"Say {number}.", "output": str(number)} for number in range(COUNT)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return make_config(
        family=family, data={"source": "text", "path": str(folder / "rows.json")},
        train={"max_length": SIDE}, launch={"num_cpu_threads_per_process": 1},
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one != "sdxl")) for one in FAMILIES]
)
def test_the_cache_reads_no_denoiser_and_training_no_encoder(
    name: str, tmp_path: Path, server: Any
) -> None:
    """The other stage's weights could not be read, and the results are those of the whole base."""
    family, config = load_family(name), configuration(name, tmp_path)
    dataset, base = tmp_path / "dataset", tmp_path / "base"
    prepare_inputs(config, tmp_path, SIDE, steps=1)

    def trained(file: str) -> bool:
        return in_part(file, family.trained_part)

    inputs = {name: tmp_path / name for name in ("encoders", "denoiser")}
    for folder in inputs.values():
        shutil.copytree(base, folder / "base")
    assert spoil(inputs["encoders"] / "base", trained)
    place = inputs["encoders"]
    cache_latents(CacheSettings.of(config), SIDE, dataset, place / "base", place / "cache")
    whole, split = (
        artifact.read(folder / "cache", "cache").files for folder in (tmp_path, inputs["encoders"])
    )
    assert whole == split

    spoilt = spoil(inputs["denoiser"] / "base", lambda file: not trained(file))
    if name in LANGUAGE_MODELS:
        assert not spoilt
        return
    assert {file.split("/")[0] for file in spoilt} == set(family.spec.classes) - {
        family.trained_part
    }
    shutil.copytree(tmp_path / "cache", inputs["denoiser"] / "cache")
    shape = {
        "family": name, "objective": TrainConfig().objective(name), "resolution": SIDE,
        "epoch_size": COUNT, "lora": LORA,
    }  # fmt: skip
    losses = {
        folder.name: Training(tmp_path, folder, server).run(folder.name, "torch", 1, **shape)
        for folder in (tmp_path, inputs["denoiser"])
    }
    assert losses["denoiser"] == losses[tmp_path.name]
