"""What a run logged and what was measured of a phase, as CSV: other programs plot it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path

from zerotrain.machine.regular_file import open_new
from zerotrain.training.reporting.log_lines import Line

COLUMNS = ("phase", "step", "samples", "loss", "learning_rate", "grad_norm")
VALIDATION = ("phase", "step", "val_loss", "val_loss_ema")
"""Columns of the losses of a validation; the last one is empty without averaged weights."""
MEMORY = ("phase", "step", "host_bytes", "device_bytes")


def write_memory(log: Sequence[Line], path: Path) -> None:
    """Write the memory that training used as CSV, for the lines of the log that have it."""
    _write(path, MEMORY, [line for line in log if "host_bytes" in line])


def write_validations(validations: Sequence[Line], path: Path) -> None:
    """Write the losses of the validations as CSV."""
    _write(path, VALIDATION, validations)


def write_metrics(phase: str, metrics: Mapping[str, float | None], path: Path) -> None:
    """Write what was measured of a phase as a row of CSV, without what could not be measured."""
    row = {"phase": phase, **{key: one for key, one in metrics.items() if one is not None}}
    _write(path, [*row], [row])


def write_csv(log: Sequence[Line], path: Path) -> None:
    """Write the log as CSV without times, so that equal trainings give equal files."""
    _write(path, COLUMNS, log)


def _write(path: Path, columns: Sequence[str], rows: Sequence[Line]) -> None:
    with TextIOWrapper(open_new(path), encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
