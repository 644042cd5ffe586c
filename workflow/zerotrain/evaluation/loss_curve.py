"""The curves of a run so far: loss as CSV and as a picture, memory as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("phase", "step", "samples", "loss", "learning_rate", "grad_norm")
COLOUR = "#1f4e8c"
SMOOTHING = 0.6
"""Share of the running mean that each line of the log keeps."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that tell of steps, without what was measured between them."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [line for line in lines if "loss" in line]


MEMORY = ("host_bytes", "device_bytes")


def write_memory(log: list[dict[str, Any]], path: Path) -> None:
    """Write what memory the training used, as CSV: a line for each of the log's that says it."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ("phase", "step", *MEMORY), lineterminator="\n")
        writer.writeheader()
        for line in log:
            if MEMORY[0] in line:
                writer.writerow({key: line.get(key) for key in ("phase", "step", *MEMORY)})


def write_csv(log: list[dict[str, Any]], path: Path) -> None:
    """Write the log as CSV, without the times, so that equal trainings give equal files."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(log)


def draw_curve(log: list[dict[str, Any]], path: Path) -> None:
    """Draw loss over steps, with its running mean and a line where a phase hands over."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    taken = [line for line in log if line["loss"] is not None]  # else every update was left out
    steps = [line["step"] for line in taken]
    losses = [line["loss"] for line in taken]
    axes.plot(steps, losses, color="#9db4d0", linewidth=1, label="logged")
    axes.plot(steps, running_mean(losses), color=COLOUR, linewidth=2, label="running mean")
    mark_phases([axes], log)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Software": None})


def mark_phases(panels: Sequence[Any], log: list[dict[str, Any]]) -> None:
    """Name each phase above the first panel, and draw a line through all where one hands over."""
    top = panels[0].get_ylim()[1]
    for phase, first, last in phase_spans(log):
        for axes in panels if first else ():
            axes.axvline(first, color="#888888", linewidth=1, linestyle="--")
        panels[0].text((first + last) / 2, top, phase, ha="center", va="bottom", color="#555555")


def running_mean(values: list[float]) -> list[float]:
    """Exponential running mean; its start is corrected as Adam corrects its moments."""
    means: list[float] = []
    total = weight = 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(total / weight)
    return means


def phase_spans(log: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Name of each phase with the steps that it begins after and ends at."""
    spans: list[tuple[str, int, int]] = []
    for line in log:
        if spans and spans[-1][0] == line["phase"]:
            spans[-1] = (line["phase"], spans[-1][1], line["step"])
        else:
            spans.append((line["phase"], spans[-1][2] if spans else 0, line["step"]))
    return spans
