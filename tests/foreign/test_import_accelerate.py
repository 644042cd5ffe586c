"""Folders of accelerate's save_state, with and without DeepSpeed, and the trainers' variants."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.foreign import maker

from zerotrain.errors import PipelineError
from zerotrain.state.external import open_external

ORDER = ["embed.weight", "first.weight", "last.weight", "first.bias", "last.bias"]
"""The trained parameters, group by group."""


@pytest.fixture(scope="session")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A folder of accelerate's save_state, made once with and once without DeepSpeed."""
    done: dict[bool, Path] = {}

    def make(zero: bool) -> Path:
        if zero not in done:
            done[zero] = tmp_path_factory.mktemp("accelerate")
            ranks(maker.train_accelerate, done[zero], zero)
        return done[zero]

    return make


@pytest.fixture
def plain(saved: Any, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy that may be changed, and what the live optimizer held."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(saved(False) / "checkpoint-3", folder)
    return folder, torch.load(saved(False) / "expected.pt")["live"]


def test_with_deepspeed_inside(saved: Any) -> None:
    """accelerate's fixed tag, pytorch_model: bit for bit what the engine held."""
    found = open_external(saved(True) / "checkpoint-3")
    expected = torch.load(saved(True) / "expected.pt")["live"]
    assert found.folder.name == "pytorch_model"
    assert sorted(found.names) == sorted(ORDER)
    for name in ORDER:
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found.tensor(name, slot), expected[name][slot])
    assert (found.position.step, found.position.optimizer_step) == (3, 3)


def test_unambiguous_shapes_need_no_names(plain: Any) -> None:
    """Every trained shape occurs once here: shapes tell which is which, and others are frozen."""
    folder, expected = plain
    found = open_external(folder)
    assert found.names == ORDER
    for name in ORDER:
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found.tensor(name, slot), expected[name][slot]), (name, slot)
    assert set(found.frozen) == {"frozen.weight", "frozen.bias", "scale"}
    position = found.position
    assert (position.step, position.optimizer_step) == (3, 3)
    assert [group["parameters"] for group in position.param_groups] == [ORDER[:3], ORDER[3:]]
    assert position.param_groups[0] == {
        "parameters": ORDER[:3], "lr": 2e-2, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1
    }  # fmt: skip
    assert (position.engine["engine"], found.lost) == ("torch", [])


def test_ambiguous_shapes_leave_the_moments_out(plain: Any) -> None:
    """Two tensors of one shape: no guess is made, and the user reads what to give."""
    folder, _ = plain
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "other": torch.zeros(9)}, folder / "model.safetensors")
    found = open_external(folder)
    assert found.slots == ["master"]
    assert "in 2 groups have numbers" in found.lost[0]
    assert found.position.param_groups == []


@pytest.mark.parametrize("part", ["unet", "transformer"])
def test_a_denoiser_next_to_the_optimizer(plain: Any, part: str) -> None:
    """As the save hooks of diffusers' scripts and SimpleTuner leave it, averaged copy and all."""
    folder, expected = plain
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name, scale in ((part, 1.0), (f"{part}_ema", 2.0)):
        (folder / name).mkdir()
        scaled = {k: scale * v for k, v in weights.items()}
        save_file(scaled, folder / name / "diffusion_pytorch_model.safetensors")
    (folder / "training_state.json").write_text('{"global_step": 3}')
    folder = folder.rename(folder.with_name("latest"))
    found = open_external(folder)
    assert torch.equal(found.tensor("last.bias", "master"), expected["last.bias"]["master"])
    assert torch.equal(found.tensor("last.bias", "exp_avg"), expected["last.bias"]["exp_avg"])
    assert (found.position.step, found.position.optimizer_step) == (3, 3)
    (folder / "training_state.json").write_text('{"global_step": 30}')
    with pytest.raises(PipelineError, match=r"optimizer\.bin: is of step 3, training_state\.json"):
        open_external(folder)


def test_shards_and_pickled_weights(plain: Any) -> None:
    """A sharded model with an index, and pytorch_model.bin, hold what the one file held."""
    folder, expected = plain
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    found = open_external(folder)
    assert torch.equal(found.tensor("first.bias", "master"), expected["first.bias"]["master"])
    (folder / "pytorch_model.bin").unlink()
    index = {}
    for number, name in enumerate(sorted(weights)):
        index[name] = f"model-{number % 2 + 1:05d}-of-00002.safetensors"
    for file in set(index.values()):
        save_file({n: t for n, t in weights.items() if index[n] == file}, folder / file)
    text = str({"metadata": {}, "weight_map": index}).replace("'", '"')
    (folder / "model.safetensors.index.json").write_text(text)
    found = open_external(folder)
    for name in ORDER:
        assert torch.equal(found.tensor(name, "master"), expected[name]["master"])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PipelineError, match=r"model-00002-of-00002.safetensors: no such file"):
        open_external(folder)


def test_what_is_not_adams_is_reported_to_be_lost(plain: Any) -> None:
    """An 8-bit optimizer's blocks are no moments; bf16 weights are no masters."""
    folder, _ = plain
    weights = load_file(folder / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in weights.items()}, folder / "model.safetensors")
    optimizer = torch.load(folder / "optimizer.bin")
    for entry in optimizer["state"].values():
        entry["state1"] = entry.pop("exp_avg").to(torch.uint8)
    torch.save(optimizer, folder / "optimizer.bin")
    found = open_external(folder)
    assert found.slots == ["master"]
    assert any("state1" in sentence for sentence in found.lost)
    assert any("torch.bfloat16" in sentence for sentence in found.lost)
    assert found.position.optimizer_step == 0


def test_without_the_optimizer_the_step_is_accelerates_guess(plain: Any) -> None:
    """Its count of micro batches is all that is left, in a pickle that also holds numpy's state."""
    folder, expected = plain
    (folder / "optimizer.bin").unlink()
    found = open_external(folder.rename(folder.parent / "final"))
    assert found.slots == ["master"]
    assert torch.equal(found.tensor("last.bias", "master"), expected["last.bias"]["master"])
    assert "optimizer.bin is not there" in found.lost[0]
    assert "count of micro batches" in found.progress


def test_the_loss_scale_of_fp16(plain: Any) -> None:
    """scaler.pt is the state of torch's GradScaler."""
    folder, _ = plain
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    torch.save({**scaler.state_dict(), "_growth_tracker": 7}, folder / "scaler.pt")
    position = open_external(folder).position
    assert position.loss_scale == {"scale": 512.0, "good_steps": 7}
    assert position.engine["mixed_precision"] == "fp16"


def test_an_unknown_folder_says_what_it_holds(tmp_path: Path) -> None:
    """A sentence, not a traceback."""
    (tmp_path / "weights.npz").touch()
    with pytest.raises(PipelineError, match=r"no layout that is known; it holds weights.npz"):
        open_external(tmp_path)
