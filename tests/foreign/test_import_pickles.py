"""Nothing of a foreign pickle is run before the user says that its maker is trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external import open_external, pickles


class Malicious:
    """Unpickling it runs a shell command."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._target}",)


class Unknown:
    """A class that is on no list."""


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    """Its command has not run when the error names it; with trust it runs: the pickle is real."""
    path, target = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "written"
    torch.save({"module": {}, "global_steps": 1, "evil": Malicious(target)}, path)
    with pytest.raises(
        PipelineError, match=r"mp_rank_00_model_states.pt: .*posix.system"
    ) as caught:
        open_external(tmp_path)
    assert "--trust-pickle" in caught.value.hint
    assert not target.exists()
    pickles.load(path, trust_pickle=True)
    assert target.exists()


def test_a_class_that_is_not_listed_is_named(tmp_path: Path) -> None:
    """Even a harmless one: what a class does at loading is not known."""
    torch.save({"other": Unknown()}, tmp_path / "file.pt")
    with pytest.raises(PipelineError, match=r"file.pt: its pickle asks for the class .*Unknown"):
        pickles.load(tmp_path / "file.pt")
    found = pickles.load(tmp_path / "file.pt", trust_pickle=True)
    assert isinstance(found["other"], Unknown)


def test_what_real_checkpoints_hold_is_read_through_stand_ins(tmp_path: Path) -> None:
    """DeepSpeed's loss scaler and stage, numpy's numbers: their values, none of their code."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    scaler = DynamicLossScaler(2.0**16, 1000, 1, 2, False)
    document = {"scaler": scaler, "stage": ZeroStageEnum.weights, "lr": numpy.float64(1e-4),
                "rng": numpy.random.default_rng(0).random(3), "shape": torch.Size([2])}  # fmt: skip
    torch.save(document, tmp_path / "file.pt")
    found = pickles.load(tmp_path / "file.pt")
    assert isinstance(found["scaler"], pickles.Record)
    assert (found["scaler"].cur_scale, found["scaler"].scale_window) == (2.0**16, 1000)
    assert (found["stage"], found["lr"], found["shape"]) == (3, 1e-4, torch.Size([2]))


def test_tensors_stay_in_the_file(tmp_path: Path) -> None:
    """Loading 64 MB takes no memory of its own: the pages are the file's."""
    torch.save({"weights": torch.zeros(16 * 2**20)}, tmp_path / "file.pt")

    def anonymous() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    before = anonymous()
    found = pickles.load(tmp_path / "file.pt")
    assert float(found["weights"].sum()) == 0.0
    assert anonymous() - before < 16 * 2**20


def test_a_file_from_before_the_zip_format_is_read(tmp_path: Path) -> None:
    """Such a file cannot be mapped; it is read whole."""
    tensor = torch.arange(5.0)
    torch.save({"a": tensor}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(pickles.load(tmp_path / "old.bin")["a"], tensor)
