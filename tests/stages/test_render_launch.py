"""render_launch publishes a phase's launch files from the dataset's count of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from zerotrain import artifact
from zerotrain.config.read import parse_config
from zerotrain.data import dataset_folder
from zerotrain.data.dataset import IMAGES, Sample
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.planner import planner
from zerotrain.stages.render_launch import LaunchSettings, render_launch

PRESETS = Path(__file__).parents[2] / "config" / "launch"


def publish_dataset(folder: Path, *, train: int, holdout: int = 0, repeats: int = 1) -> Path:
    """A dataset of so many samples."""
    samples = [
        Sample(f"{i}.png", f"{i}", "a", "a", (8, 8), (8, 8), (0, 0, 8),
               "train" if i < train else "holdout")
        for i in range(train + holdout)
    ]  # fmt: skip
    dataset_folder.publish_dataset(folder, IMAGES, samples, repeats=repeats)
    return folder


def publish_base(folder: Path) -> Path:
    """A base model of one layer, and a VAE that is not trained."""
    if not folder.exists():
        with artifact.publish(folder, "base") as draft:
            for part, width in (("unet", 3001), ("vae", 9999)):
                (draft.folder / part).mkdir()
                layer = {"a.weight": torch.zeros(width, 50), "a.bias": torch.zeros(50)}
                save_file(layer, draft.folder / part / "diffusion_pytorch_model.safetensors")
    return folder


def render(folder: Path, dataset: Path, name: str, preset: str, **changes: Any) -> Path:
    """Render a phase; the folder of its launch files."""
    raw = {
        "run": "flowers",
        "base": "nano",
        "data": {"source": "digits"},
        "train": {"global_batch_size": 4},
        "phases": [
            {"name": "plain", "until": "2 epochs"},
            {"name": "offload", "until": "3 epochs", "launch": "zero2_offload"},
        ],
        **changes,
    }
    output = folder / name / "launch"
    chosen = PRESETS / f"{preset}.yaml"
    base = None if preset == "torch" else publish_base(folder / "base")
    settings = LaunchSettings.of(parse_config(raw, "c"), name)
    render_launch(settings, dataset, chosen, base, None, output)
    return output


def test_files_are_published_and_name_their_place(tmp_path: Path) -> None:
    """accelerate's file names the DeepSpeed file where it will be, not where it was written."""
    dataset = publish_dataset(tmp_path / "data", train=10)
    plain = artifact.read(render(tmp_path, dataset, "plain", "torch"), "launch")
    assert sorted(plain.files) == ["accelerate.yaml", "run.yaml"]
    offload = artifact.read(render(tmp_path, dataset, "offload", "zero2_offload"), "launch")
    assert sorted(offload.files) == ["accelerate.yaml", "deepspeed.json", "run.yaml"]
    named = yaml.safe_load(offload.path("accelerate.yaml").read_text())["deepspeed_config"]
    assert Path(named["deepspeed_config_file"]) == offload.path("deepspeed.json")


def test_buckets_are_those_of_the_base_model(tmp_path: Path) -> None:
    """Of the part that is trained; a ZeRO preset without a model is refused."""
    dataset = publish_dataset(tmp_path / "data", train=10)
    phase = read_run_yaml(render(tmp_path, dataset, "offload", "zero2_offload") / "run.yaml")
    assert phase.derived.deepspeed["zero_optimization"]["reduce_bucket_size"] == 3002 * 50
    config = {"run": "a", "base": "nano", "data": {"source": "digits"}}
    config["phases"] = [{"name": "a", "until": 1, "launch": "zero1"}]
    preset = PRESETS / "zero1.yaml"
    settings = LaunchSettings.of(parse_config(config, "c"), "a")
    with pytest.raises(PipelineError, match="preset zero1 is fitted to the model, and none"):
        render_launch(settings, dataset, preset, None, None, tmp_path / "x")


def test_auto_renders_the_preset_that_the_planner_takes(tmp_path: Path, monkeypatch) -> None:
    """With its reason in run.yaml; all else is as if the phase had named it."""
    made: list[Any] = []

    def plan(config: Any, name: str, place: Any, *, auto: Path, base: Path) -> str:
        made.append((name, auto.name, base))
        return "a plan"

    monkeypatch.setattr(planner, "plan", plan)
    monkeypatch.setattr(planner, "choose_preset", lambda made: ("zero2_offload", f"of {made}"))
    dataset = publish_dataset(tmp_path / "data", train=10)
    phases = [
        {"name": "plain", "until": 5},
        {"name": "offload", "until": 9, "launch": {"preset": "auto", "device_memory": "9 GiB"}},
    ]
    output = render(tmp_path, dataset, "offload", "auto", phases=phases)
    assert made == [("offload", "auto.yaml", tmp_path / "base")]
    phase = read_run_yaml(output / "run.yaml")
    assert (phase.launch.preset, phase.derived.zero_stage, phase.derived.offload_optimizer) == (
        "zero2_offload",
        2,
        "cpu",
    )
    assert phase.sources["preset"] == ("derived", "of a plan")
    assert phase.derived.deepspeed["zero_optimization"]["reduce_bucket_size"] == 3002 * 50


def test_epochs_are_those_of_the_dataset(tmp_path: Path) -> None:
    """Training samples times repeats; what is held out is not trained on."""
    dataset = publish_dataset(tmp_path / "data", train=10, holdout=7, repeats=3)
    phase = read_run_yaml(render(tmp_path, dataset, "plain", "torch") / "run.yaml")
    assert (phase.derived.epoch_size, phase.derived.start_step, phase.derived.until_step) == (
        30,
        0,
        15,
    )
    phase = read_run_yaml(render(tmp_path, dataset, "offload", "zero2_offload") / "run.yaml")
    assert (
        phase.derived.start_step,
        phase.derived.until_step,
        phase.derived.lr_scheduler_steps,
    ) == (15, 23, 23)


def test_nothing_is_published_where_values_do_not_fit(tmp_path: Path) -> None:
    """An error leaves no half-written folder."""
    dataset = publish_dataset(tmp_path / "data", train=1)
    phases = [{"name": "plain", "until": 5}, {"name": "offload", "until": 3}]
    with pytest.raises(PipelineError, match="phase offload: until 3 steps is step 3"):
        render(tmp_path, dataset, "plain", "torch", phases=phases)
    assert not (tmp_path / "plain").exists()


def test_a_dataset_without_training_samples_is_refused(tmp_path: Path) -> None:
    """Everything held out leaves nothing to learn from."""
    dataset = publish_dataset(tmp_path / "data", train=0, holdout=3)
    with pytest.raises(PipelineError, match="the dataset has no training samples"):
        render(tmp_path, dataset, "plain", "torch")
