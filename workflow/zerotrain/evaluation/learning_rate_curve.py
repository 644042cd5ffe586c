"""The learning rate of a run so far, as it was trained with, and Adam's first beta where a schedule
moved it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from zerotrain.evaluation.loss_curve import COLOUR, mark_phases, phase_spans


def draw_learning_rate(log: list[dict[str, Any]], path: Path) -> None:
    """Draw it over the steps of all phases, one line for each; the beta below, if there is one."""
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
        axes.yaxis.set_major_formatter(lambda number, _: short(number))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(bottom=0)
    mark_phases(panels, log)
    panels[-1].set_xlabel("step")
    panels[-1].set_xlim(left=0)
    figure.savefig(path, metadata={"Software": None})


def short(number: float) -> str:
    """A learning rate as people write it: 8e-5."""
    if number == 0 or number >= 0.01:
        return f"{number:g}"
    mantissa, _, exponent = f"{number:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
