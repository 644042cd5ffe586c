"""How a training process ends is a sentence, and left for the stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.phases import make_phase

from zerotrain.launch.run_yaml import write_run_yaml
from zerotrain.training import rank


def test_a_device_out_of_memory_names_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's figures, no traceback, exit code 2."""

    def full(**_: Any) -> bool:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 "
            "GiB. Of the allocated memory 7 GiB is allocated by PyTorch"
        )

    monkeypatch.setattr(rank, "run", full)
    (tmp_path / "launch").mkdir()
    write_run_yaml(make_phase(), tmp_path / "launch" / "run.yaml")
    words = {"launch": tmp_path / "launch", "base": "b", "cache": "c", "progress": tmp_path}
    rank.main([word for key, value in words.items() for word in (f"--{key}", str(value))])
    said = (
        "phase plain: the device ran out of memory: CUDA out of memory. Tried to allocate 2.00 "
        "GiB. GPU 0 has a total capacity of 8.00 GiB."
    )
    assert json.loads((tmp_path / "exit.json").read_text()) == {"code": 2, "reason": said}
    text = capsys.readouterr().err
    assert f"ERROR: {said}\n" in text
    assert "`zerotrain switch cats --to zero2_offload`" in text
