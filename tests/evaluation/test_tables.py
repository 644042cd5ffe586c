"""What a run logged as CSV."""

from __future__ import annotations

import csv
from pathlib import Path

from zerotrain.evaluation.results import write_csv, write_memory


def line(phase: str, step: int, loss: float) -> dict[str, object]:
    """A line of the training log."""
    return {
        "phase": phase,
        "step": step,
        "samples": 2 * step,
        "loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "seconds": 0.1 * step,
    }


LOG = [line("plain", 10, 1.0), line("plain", 20, 0.8), line("offload", 30, 0.7)]


def test_the_csv_holds_the_log_without_its_times(tmp_path: Path):
    """Two equal trainings of different speed give equal bytes."""
    write_csv(LOG, tmp_path / "a.csv")
    write_csv([entry | {"seconds": 9.0} for entry in LOG], tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    with (tmp_path / "a.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["phase"], int(row["step"]), float(row["loss"])) for row in rows] == [
        ("plain", 10, 1.0),
        ("plain", 20, 0.8),
        ("offload", 30, 0.7),
    ]


def test_memory_has_a_line_where_the_log_says_it(tmp_path: Path):
    """Logs of before say nothing of it."""
    write_memory([LOG[0], LOG[1] | {"host_bytes": 5, "device_bytes": 0}], tmp_path / "memory.csv")
    assert (tmp_path / "memory.csv").read_text() == (
        "phase,step,host_bytes,device_bytes\nplain,20,5,0\n"
    )
