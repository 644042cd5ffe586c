"""Runs for a comparison: launches, logs and evaluations, without a training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.builders.phases import make_tiny_phase

from zerotrain.launch.files import write_run_yaml


def write_phase(
    run: str,
    phase: str,
    log: Sequence[dict[str, Any]],
    *,
    preset: str = "torch",
    start: int = 0,
    until: int = 20,
    **values: Any,
) -> Path:
    """A phase of results/ that still trains: its run.yaml with these values, and its log."""
    folder = Path("results", run, phase)
    (folder / "launch").mkdir(parents=True)
    (folder / "progress").mkdir()
    resolved = make_tiny_phase(phase, preset, until).with_values(
        run=run, start_step=start, **values
    )
    write_run_yaml(resolved, folder / "launch/run.yaml")
    text = "".join(json.dumps(line) + "\n" for line in log)
    (folder / "progress/metrics.jsonl").write_text(text)
    return folder


def make_log(phase: str, first: int, losses: Sequence[float]) -> list[dict[str, Any]]:
    """A line each ten steps, which take five seconds."""
    return [
        {
            "phase": phase, "step": first + 10 * place, "samples": 40 * place, "loss": loss,
            "learning_rate": 1e-3, "seconds": 5.0 * place,
        }
        for place, loss in enumerate(losses, start=1)
    ]  # fmt: skip
