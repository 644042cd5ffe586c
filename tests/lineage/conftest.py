"""A small published chain: a folder of images, two phases, weights, and their export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.cache.layout import Entry, Index, Series, write_index
from zerotrain.cli.inspection import trace as command
from zerotrain.config.data import DataConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.stages.prepare_dataset import prepare_dataset

ENGINE = {"preset": "torch", "engine": "torch"}


def published(
    folder: str,
    kind: str,
    files: Mapping[str, str],
    parents: Mapping[str, Artifact],
    **content: Any,
) -> Artifact:
    """Publish a folder of texts."""
    made_by = {"run": "cats", "engine": ENGINE}
    with artifact.publish(Path(folder), kind, parents=parents, made_by=made_by) as draft:
        for name, text in files.items():
            (draft.folder / name).parent.mkdir(exist_ok=True)
            (draft.folder / name).write_text(text)
        draft.content = content
    return artifact.read(Path(folder), kind)


def position(phase: str, step: int, **more: Any) -> str:
    """What checkpoint.json and state.json say, as far as a trace reads it."""
    return json.dumps(
        {"run": "cats", "phase": phase, "step": step, "samples": 2 * step, "optimizer": "adamw",
         "param_groups": [{"lr": 0.001}], "engine": ENGINE, **more}
    )  # fmt: skip


def train(phase: str, steps: tuple[int, int], shared: dict[str, Artifact]) -> Artifact:
    """A phase's launch, checkpoint, state and weights; returns the state."""
    run = {"preset": {"value": "torch"}, "learning_rate": {"value": 0.001},
           "start_step": {"value": steps[0]}, "until_step": {"value": steps[1]},
           "epoch_size": {"value": 3}}  # fmt: skip
    place, step = f"results/cats/{phase}", steps[1]
    launch = published(f"{place}/launch", "launch", {"run.yaml": json.dumps(run)}, {})
    ran_on = {"cache": shared["cache"].identity}
    files = {
        "checkpoint.json": position(phase, step, ran_on=ran_on),
        "rank.safetensors": f"tensors of {step}",
    }
    trains = {"start": shared["start"].identity if "start" in shared else None}
    parents = {**shared, "launch": launch}
    checkpoint = published(f"{place}/checkpoint", "checkpoint", files, parents, trains=trains)
    # A rolling checkpoint names no parents.
    published(f"{place}/progress/step-{step}", "checkpoint", files, {}, trains=trains)
    origin = {"base": shared["base"], "checkpoint": checkpoint}
    files = {"state.json": position(phase, step), "master.safetensors": f"master of {step}"}
    state = published(f"{place}/state", "state", files, origin)
    named = {"unet/model.safetensors": f"weights of {step}", "model_index.json": "{}"}
    published(f"{place}/weights", "weights", named, origin, family="sdxl", step=step, dtype="fp32")
    return state


def build() -> None:
    """Make everything in the working directory."""
    for number, name in enumerate(("cat", "dog", "fox", "owl")):
        Path("photos/more").mkdir(parents=True, exist_ok=True)
        photo = Path("photos/more" if name == "owl" else "photos") / f"{name}.ppm"
        Image.new("RGB", (64, 64), (60 * number, 9, 9)).save(photo)
        photo.with_suffix(".txt").write_text(f"a {name}\n")
    data = DataConfig(images="photos", holdout=0.5)
    prepare_dataset(data, Path("results/data/cats"))
    dataset = artifact.read(Path("results/data/cats"), "dataset")
    size = (64, 64)
    entries = [
        Entry(
            *(one.file, one.image_sha256, one.caption_sha256, one.image_sha256),
            *(one.caption_sha256, size, (0, 0), size, one.split),
        )
        for one in read_dataset(dataset.folder).samples
    ]
    base = published("results/cats/base", "base", {"unet/config.json": "{}"}, {}, family="sdxl")
    parents = {"dataset": dataset, "base": base}
    with artifact.publish(Path("results/data/cats/cache/64"), "cache", parents=parents) as draft:
        (draft.folder / "latents.safetensors").write_text("latents")
        none = Series(1, (), ())
        index = Index(64, "fp32", 1, entries, "0" * 64, none, none, data_sha256="0" * 64)
        write_index(draft.folder, index)
        draft.content = {"resolution": 64}
    cache = artifact.read(Path("results/data/cats/cache/64"), "cache")
    state = train("plain", (0, 3), {"base": base, "cache": cache})
    train("offload", (3, 7), {"base": base, "cache": cache, "start": state})
    weights = artifact.read(Path("results/cats/offload/weights"), "weights")
    files = {"model.safetensors": "one file"}
    content = {**weights.content, "to": "single_file"}
    published("results/single", "exported", files, {"weights": weights}, **content)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain, built once."""
    folder = tmp_path_factory.mktemp("chain") / "project"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        build()
    return folder


@pytest.fixture
def chain(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the chain, in which the test works."""
    folder = tmp_path / "project"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


alone = typer.Typer()
alone.command()(command)


def trace(*words: str) -> tuple[int, str]:
    """Call the command: its exit code and what it printed."""
    done = CliRunner().invoke(alone, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout
