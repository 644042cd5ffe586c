"""The curves of a run so far: loss and learning rate as plots, loss and memory as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from zerotrain.machine.regular_file import open_new
from zerotrain.training.reporting.log_lines import Line, read_lines

COLUMNS = ("phase", "step", "samples", "loss", "learning_rate", "grad_norm")
COLOUR = "#1f4e8c"
VALIDATION = ("phase", "step", "val_loss", "val_loss_ema")
"""Columns of the losses of a validation; the last one is empty without averaged weights."""
SMOOTHING = 0.6
"""Share of the running mean that is kept at each line of the log."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl for steps, without validations."""
    return [line for line in read_lines(path) if "loss" in line]


def read_validations(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl for validations."""
    return [line for line in read_lines(path) if VALIDATION[2] in line]


MEMORY = ("host_bytes", "device_bytes")


def _writing(path: Path) -> TextIOWrapper:
    return TextIOWrapper(open_new(path), encoding="utf-8", newline="")


def write_memory(log: Sequence[Line], path: Path) -> None:
    """Write the memory that training used as CSV, for the lines of the log that have it."""
    with _writing(path) as stream:
        writer = csv.DictWriter(stream, ("phase", "step", *MEMORY), lineterminator="\n")
        writer.writeheader()
        for line in log:
            if MEMORY[0] in line:
                writer.writerow({key: line.get(key) for key in ("phase", "step", *MEMORY)})


def write_validations(validations: Sequence[Line], path: Path) -> None:
    """Write the losses of the validations as CSV."""
    with _writing(path) as stream:
        writer = csv.DictWriter(stream, VALIDATION, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(validations)


def write_metrics(phase: str, metrics: Mapping[str, float | None], path: Path) -> None:
    """Write what was measured of a phase as a row of CSV, without what could not be measured."""
    row = {"phase": phase, **{key: one for key, one in metrics.items() if one is not None}}
    with _writing(path) as stream:
        writer = csv.DictWriter(stream, row, lineterminator="\n")
        writer.writeheader()
        writer.writerow(row)


def write_csv(log: Sequence[Line], path: Path) -> None:
    """Write the log as CSV without times, so that equal trainings give equal files."""
    with _writing(path) as stream:
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(log)


def draw_curve(log: Sequence[Line], path: Path) -> None:
    """Plot loss over steps, with its running mean and a line at the start of each later phase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    taken = [line for line in log if line["loss"] is not None]  # None if every update was skipped
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


def draw_learning_rate(log: Sequence[Line], path: Path) -> None:
    """Plot the learning rate over the steps, with a line for each phase.

    Adam's first beta is plotted below, if a schedule changed it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    values = ["learning_rate"]
    if any("beta1" in line for line in log):
        values.append("beta1")
    figure = Figure(figsize=(8, 1.2 + 1.6 * len(values)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(values), sharex=True, squeeze=False)[:, 0].tolist()
    for axes, value in zip(panels, values, strict=True):
        for _, first, last in phase_spans(log):
            lines = [line for line in log if first < line["step"] <= last]
            axes.plot(
                [line["step"] for line in lines],
                [line.get(value, math.nan) for line in lines],
                color=COLOUR,
                linewidth=2,
                marker="o" if len(lines) == 1 else "",
            )
        axes.set_ylabel(value.replace("_", " "))
        axes.yaxis.set_major_formatter(lambda number, _: format_learning_rate(number))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(bottom=0)
    mark_phases(panels, log)
    panels[-1].set_xlabel("step")
    panels[-1].set_xlim(left=0)
    figure.savefig(path, metadata={"Software": None})


def format_learning_rate(number: float) -> str:
    """Format a learning rate in its usual short form: 8e-5."""
    if number == 0 or number >= 0.01:
        return f"{number:g}"
    mantissa, _, exponent = f"{number:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def mark_phases(panels: Sequence[Any], log: Sequence[Line]) -> None:
    """Name each phase above the first panel, and draw a line in all panels where one starts."""
    top = panels[0].get_ylim()[1]
    for phase, first, last in phase_spans(log):
        for axes in panels if first else ():
            axes.axvline(first, color="#888888", linewidth=1, linestyle="--")
        panels[0].text((first + last) / 2, top, phase, ha="center", va="bottom", color="#555555")


def running_mean(values: list[float]) -> list[float]:
    """Compute an exponential running mean, with Adam's bias correction for its start."""
    means: list[float] = []
    total = weight = 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(total / weight)
    return means


def phase_spans(log: Sequence[Line]) -> list[tuple[str, int, int]]:
    """Return the name of each phase, with the step before its first one and its last step."""
    spans: list[tuple[str, int, int]] = []
    for line in log:
        if spans and spans[-1][0] == line["phase"]:
            spans[-1] = (line["phase"], spans[-1][1], line["step"])
        else:
            spans.append((line["phase"], spans[-1][2] if spans else 0, line["step"]))
    return spans
