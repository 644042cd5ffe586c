"""Grids of the base model and of weights without averaging, next to those of a phase."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.builders.exports import SLOTS, Export
from tests.builders.images import make_image_config, prepare_inputs, publish_nano, write_pictures
from tests.builders.models import move_far
from tests.builders.states import make_position

from zerotrain import artifact
from zerotrain.artifact import link_or_copy
from zerotrain.config.run import RunConfig
from zerotrain.evaluation.images import measure_images, put_values
from zerotrain.export.export import export
from zerotrain.export.target import WeightsTarget
from zerotrain.models.families import load_family
from zerotrain.stages.evaluate import EvaluateSettings, evaluate, find_base
from zerotrain.stages.export_weights import ExportSettings
from zerotrain.state.position import EMA_SLOT, MASTER
from zerotrain.state.state import State, write_state

FAMILY: Any = load_family("sdxl")
LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["to_q", "to_v"]}
LAYERS = ["to_q", "to_k", "to_v", "proj_mlp"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "bf16": {"export": {"dtype": "bf16"}},
    "dora": {"lora": {**LORA, "use_dora": True}},
    "lokr": {"peft": {"peft_type": "LOKR", "r": 3, "alpha": 6, "target_modules": ["to_q"]}},
    "fused": {"family": "flux", "lora": {**LORA, "fused_layers": True, "target_modules": LAYERS}},
}
"""Sections of a run for each kind of what is trained."""
SUITES: dict[str, Any] = {"bf16": pytest.mark.slow, "fused": ()}
"""Kinds that CI has; `make test-soak` has the others."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base of each family."""
    folder = tmp_path_factory.mktemp("bases")
    return {family: publish_nano(family, folder / family) for family in ("sdxl", "flux")}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=SUITES.get(kind, pytest.mark.soak)) for kind in ADAPTERS],
)
def test_weights_of_the_training_are_those_of_an_export_without_averaging(bases, tmp_path, kind):
    """Each tensor of the model, or of its adapter, bit by bit, in the type of the export."""
    sections = ADAPTERS[kind]
    family = sections.get("family", "sdxl")
    made = Export(tmp_path, bases[family])
    made.slots, made.settings = [*SLOTS, EMA_SLOT], sections
    dtype = sections.get("export", {}).get("dtype", "fp32")
    config = made.config(dtype)
    weights, trained = made.export(dtype=dtype), State(made.state)
    target = WeightsTarget.of(ExportSettings.of(config), bases[family], tmp_path / "raw")
    export(trained, made.state, replace(target, ema=False), None)
    found, raw = (part_of(family, folder) for folder in (weights, tmp_path / "raw"))
    expected = dict(raw.named_parameters())
    changed = [name for name, p in found.named_parameters() if not torch.equal(p, expected[name])]
    assert changed
    put_values(found, trained, dtype)
    assert {name: p.tolist() for name, p in found.named_parameters()} == {
        name: p.tolist() for name, p in expected.items()
    }


def part_of(family: str, folder: Path) -> torch.nn.Module:
    """The trained part of a pipeline, loaded from an export."""
    loaded: Any = load_family(family)
    part: torch.nn.Module = getattr(loaded.load_pipeline(folder, "cpu"), loaded.trained_part)
    return part


def config_of(folder: Path) -> RunConfig:
    """A run of two phases on the images in a folder."""
    return make_image_config(
        folder / "images", data={"holdout": 0.5}, run="houses",
        phases=[{"name": "first", "until": 20}, {"name": "second", "until": 30}],
        evaluate={"images_per_prompt": 2, "num_inference_steps": 2, "prompts": ["a red house"]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phase up to its weights, which are averaged ones, and its state, which has both."""
    folder = tmp_path_factory.mktemp("run")
    write_pictures(folder / "images", ["a red house", "a blue house"])
    prepare_inputs(config_of(folder), folder)
    parameters = dict(FAMILY.load_model(folder / "base").named_parameters())
    values = {slot: move_far(parameters, seed=n) for n, slot in enumerate((MASTER, EMA_SLOT))}
    publish_weights(folder, "weights", values[EMA_SLOT], ema=True)
    publish_weights(folder, "trained", values[MASTER])
    shapes = {name: list(tensor.shape) for name, tensor in parameters.items()}
    with artifact.publish(folder / "state", "state") as draft:
        position = make_position(20, run="houses", phase="first")
        write_state(
            draft.folder, position, shapes, [*values], lambda name, slot: values[slot][name]
        )
        (draft.folder / "records").mkdir()
        (draft.folder / "records/metrics.jsonl").write_text("")
        (draft.folder / "records/resources.json").write_text(json.dumps({"train_seconds": 1.0}))
    return folder


def publish_weights(folder: Path, name: str, values: dict[str, torch.Tensor], **content: Any):
    base = artifact.read(folder / "base", "base")
    with artifact.publish(folder / name, "weights", parents={"base": base}) as draft:
        for file in base.files:
            if not file.startswith("unet/"):
                link_or_copy(base.path(file), draft.folder / file)
        model = FAMILY.load_model(folder / "base")
        model.load_state_dict(values, strict=False)
        model.save_pretrained(draft.folder / "unet")
        draft.content = {"family": "sdxl", "dtype": "fp32", **content}


def evaluated(run: Path, phase: str, out: Path) -> artifact.Artifact:
    """The evaluation of the weights as those of a phase."""
    settings = EvaluateSettings.of(config_of(run), phase)
    inputs = (run / name for name in ("dataset", "cache", "weights", "state"))
    evaluate(settings, *inputs, out, out.with_suffix(".json"))
    return artifact.read(out, "evaluation")


def grid_of(run: Path, weights: str, out: Path) -> bytes:
    """The grid that weights get of their own."""
    settings = EvaluateSettings.of(config_of(run), "first")
    out.mkdir()
    measure_images(settings, run / "dataset", run / "cache", run / weights, "cpu").write(out)
    return pixels(out / "grid.png")


def pixels(file: Path) -> bytes:
    return Image.open(file).tobytes()


def test_the_first_phase_shows_the_base_and_both_weights(run, tmp_path):
    """By the prompts and seeds of the phase's own grid, which is the same with and without them."""
    found = evaluated(run, "first", tmp_path / "first")
    assert {name for name in found.files if "/" not in name and name.endswith(".png")} == {
        "grid.png", "base.png", "raw.png", "loss.png", "learning_rate.png",
    }  # fmt: skip
    shown = {"grid.png": "weights", "base.png": "base", "raw.png": "trained"}
    made = {file: pixels(found.path(file)) for file in shown}
    assert made == {file: grid_of(run, name, tmp_path / name) for file, name in shown.items()}
    assert len(set(made.values())) == 3
    assert found.parents["base"]["identity"] == artifact.read(run / "base", "base").identity


def test_a_later_phase_and_a_base_that_has_changed_show_no_base(run, tmp_path):
    """The base is shown once in a run, and only the one that was trained."""
    found = evaluated(run, "second", tmp_path / "second")
    assert "base.png" not in found.files
    assert "raw.png" in found.files
    assert "base" not in found.parents
    settings = EvaluateSettings.of(config_of(run), "first")
    weights = artifact.read(run / "weights", "weights")
    weights.parents["base"]["identity"] = "0" * 64
    assert find_base(settings, weights) is None
    weights.parents["base"]["path"] = str(tmp_path / "gone")
    assert find_base(settings, weights) is None
