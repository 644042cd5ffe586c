"""Folders of other programs that are no checkpoints to start from: unfinished, or distributed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed
from accelerate.commands import accelerate_cli
from safetensors.torch import save_file
from tests.builders.refusals import refused

from zerotrain.state.external import open_external

WEIGHTS = {"first.weight": torch.arange(6.0).reshape(2, 3), "first.bias": torch.ones(2)}


def write_checkpoint(folder: Path, *, state: bool = True, optimizer: bool = True) -> None:
    """A folder as HF's Trainer writes it, file by file in this order."""
    folder.mkdir(parents=True)
    save_file(WEIGHTS, folder / "model.safetensors")
    if optimizer:
        torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    if state:
        (folder / "trainer_state.json").write_text('{"global_step": 10}')


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("tmp-checkpoint-15", {}),
        ("checkpoint-15", {"state": False}),
        ("checkpoint-15", {"state": False, "optimizer": False}),
    ],
)
def test_an_unfinished_checkpoint_is_not_recommended(
    tmp_path: Path, name: str, written: dict[str, bool]
) -> None:
    """HF's Trainer was ended while it wrote; the one before it is whole."""
    write_checkpoint(tmp_path / "checkpoint-10")
    write_checkpoint(tmp_path / name, **written)
    error = refused(open_external, tmp_path)
    assert f"resume_from_checkpoint: {tmp_path / 'checkpoint-10'}`" in str(error.hint)
    assert error.what.endswith(f"; unfinished: {name}")


def test_checkpoints_of_weights_alone_are_as_whole_as_each_other(tmp_path: Path) -> None:
    """As trainings write them with save_only_model."""
    for step in (5, 15):
        write_checkpoint(tmp_path / f"checkpoint-{step}", optimizer=False)
    error = refused(open_external, tmp_path)
    assert f"`zerotrain state show {tmp_path / 'checkpoint-15'}`" in str(error.hint)
    assert "unfinished" not in error.what


@pytest.mark.parametrize("place", ["checkpoint-4/pytorch_model_fsdp_0", "step-4"])
def test_a_distributed_checkpoint_is_named_and_its_weights_are_reached(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command of the hint: every weight is there, bit for bit."""
    folder = tmp_path / place
    distributed.save({"model": WEIGHTS}, checkpoint_id=folder, no_dist=True)
    named = folder.parent if "fsdp" in place else folder
    error = refused(open_external, named)
    assert "a checkpoint of torch.distributed.checkpoint (FSDP, torchtitan)" in error.what
    words = shlex.split(str(error.hint).split("`")[1].replace("OUT", str(tmp_path / "out")))
    assert words[0] == "accelerate"
    monkeypatch.setattr(sys, "argv", words)
    accelerate_cli.main()
    found = open_external(tmp_path / "out")
    for name, tensor in WEIGHTS.items():
        assert torch.equal(found.tensor(name, "master"), tensor)


def test_a_whole_checkpoint_of_fsdp_is_named(tmp_path: Path) -> None:
    """Its weights can be read under the name that a model has."""
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    torch.save(WEIGHTS, folder / "pytorch_model_fsdp.bin")
    torch.save({}, folder / "optimizer.bin")
    assert "a checkpoint of FSDP" in refused(open_external, folder).what
    own = tmp_path / "own"
    own.mkdir()
    (folder / "pytorch_model_fsdp.bin").rename(own / "pytorch_model.bin")
    assert torch.equal(open_external(own).tensor("first.bias", "master"), torch.ones(2))
