"""The loss curve as CSV and picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from zerotrain.evaluation.curves import (
    draw_curve,
    phase_spans,
    read_log,
    running_mean,
    write_csv,
    write_memory,
)


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
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    write_csv(read_log(tmp_path / "log.jsonl"), tmp_path / "a.csv")
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


def test_a_phase_begins_where_the_one_before_ends():
    assert phase_spans(LOG) == [("plain", 0, 20), ("offload", 20, 30)]
    assert phase_spans([]) == []


def test_the_running_mean_starts_at_the_first_value():
    means = running_mean([2.0, 2.0, 0.0])
    assert means[:2] == pytest.approx([2.0, 2.0])
    assert means[2] == pytest.approx(2 - 2 / (1 + 0.6 + 0.36))


@pytest.mark.parametrize("log", [LOG, LOG[:1], []])
def test_the_picture_is_drawn_from_any_log(tmp_path: Path, log):
    """Equal logs give equal bytes."""
    draw_curve(log, tmp_path / "a.png")
    draw_curve(log, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 600
