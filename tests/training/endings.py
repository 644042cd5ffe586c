"""How a process of a training ends, and what it was last heard of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders.phases import make_phase

from zerotrain.launch.files import write_run_yaml
from zerotrain.machine.processes import this_process
from zerotrain.training import rank
from zerotrain.training.reporting.heartbeat import RankStatus


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """A training process whose training ends so; its exit code."""

    def end(**_: Any) -> bool:
        raise error

    monkeypatch.setattr(rank, "run", end)
    (folder / "launch").mkdir()
    write_run_yaml(make_phase(), folder / "launch" / "run.yaml")
    words = {"launch": folder / "launch", "base": "b", "cache": "c", "progress": folder}
    return rank.main([word for key, value in words.items() for word in (f"--{key}", str(value))])


def beat(rank: int, *, step: int | None = 4, waits: bool = False, ago: float = 0.0) -> RankStatus:
    """What a process of this very pid may have reported."""
    return RankStatus(rank, this_process(), step, "x", waits, 9.0, 1000.0 - ago)
