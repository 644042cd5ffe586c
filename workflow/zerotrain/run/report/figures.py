"""What the page is made of: pictures, tables, panels that join them with text, and the figures of a
run's curves and costs, each for a light and a dark page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

from zerotrain.machine.regular_file import open_new
from zerotrain.run.curves import Curves, Span

Row = Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A picture inside the page."""

    alt: str
    """What it shows, in words."""
    light: bytes
    """PNG or WebP."""
    dark: bytes | None = None
    """The same for a dark page; None: `light` serves both."""

    @property
    def kind(self) -> str:
        """Return the MIME type."""
        return "image/webp" if self.light[8:12] == b"WEBP" else "image/png"


@dataclass(frozen=True)
class Table:
    """Rows whose first cell is their name."""

    rows: Sequence[Row]
    head: Row = ()
    numbers: bool = False
    """Whether the cells after the first are numbers, which are aligned to the right."""


@dataclass(frozen=True)
class Panel:
    """A title with sentences, a picture and its numbers."""

    title: str
    text: Sequence[str] = ()
    picture: Picture | None = None
    table: Table | None = None
    shown: bool = True
    """Whether the table is open; otherwise a click opens it."""


@dataclass(frozen=True)
class Chapter:
    """One of the page's four questions with its answer."""

    anchor: str
    title: str
    panels: Sequence[Panel] = ()
    missing: Sequence[str] = ()
    """A sentence for each part that the run has no data for."""


@dataclass
class Missing:
    """Collects the sentences of a chapter about what is not there."""

    sentences: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Add a sentence."""
        self.sentences.append(sentence)


WIDTH, HEIGHT = 6.2, 3.0
"""Inches. Text of 10 points stays legible where the figure is scaled to a phone's width."""
PANEL_HEIGHT = 1.8
"""Inches that each further chart of a figure takes."""
DPI = 130
MOST_POINTS = 2000
"""Points of a curve that are drawn; more would be narrower than a pixel."""

MOST_NAMED = 7
"""Curves that a legend names: the palette has as many colours."""
SMOOTHING = 0.6
"""Share of the running mean that is kept at each point."""
SMOOTHED_LINES = 20
"""Lines of the log from which a running mean is drawn."""

Point = tuple[float, float]
"""Step and value."""


@dataclass(frozen=True)
class Palette:
    """The colours of a figure."""

    paper: str
    ink: str
    soft: str
    line: str
    series: Sequence[str]
    """By order; distinguishable for the colour-blind (Okabe and Ito)."""


Draw = Callable[[Any, Palette], None]
"""Draws on matplotlib's axes with the colours of a palette."""

LIGHT = Palette(
    *("#ffffff", "#1c1f23", "#5d6673", "#d9dde3"),
    ("#0060a8", "#c04f00", "#00785a", "#a0468c", "#6b5d00", "#5d6673", "#8f1d2c"),
)
DARK = Palette(
    *("#15181c", "#e6e8eb", "#9aa4b1", "#363c45"),
    ("#6cb6ff", "#ff9f57", "#4fd1a5", "#e599d0", "#e0cc55", "#9aa4b1", "#ff8b98"),
)


@dataclass(frozen=True)
class Curve:
    """A series over the steps."""

    label: str
    """Empty: the legend leaves it out."""
    points: Sequence[Point]
    smooth: bool = False
    """Whether the running mean is drawn over the points."""
    dots: bool = False
    """Whether the points are marked: there are few."""
    dashed: bool = False
    place: int | None = None
    """Place of its colour in the palette, for curves that belong together; None: its own place."""


@dataclass(frozen=True)
class Chart:
    """Series over one axis of steps.

    Attributes:
        name: Name and unit of the values.
        curves: The series.
        rates: Whether the values are learning rates, which have their usual short form.
        bottom: The lowest value of the axis; None: the data's.
    """

    name: str
    curves: Sequence[Curve]
    rates: bool = False
    bottom: float | None = None


def loss_chart(log: Curves) -> Chart:
    """Return the training loss of a log."""
    points = log.series("loss")
    smooth = len(points) > SMOOTHED_LINES
    return Chart("loss", [Curve("training loss", points, smooth=smooth)])


def rate_chart(log: Curves) -> Chart:
    """Return the learning rate of a log."""
    curve = Curve("learning rate", log.series("learning_rate"))
    return Chart("learning rate", [curve], rates=True, bottom=0)


def draw_curves(
    alt: str,
    chart: Chart,
    spans: Sequence[Span],
    changes: Sequence[int] = (),
    *,
    over: str = "step",
) -> Picture:
    """Draw series over the steps, with the name of each phase and a line at each switch.

    Args:
        alt: What the figure shows, in words.
        chart: The series.
        spans: The phases; a curve is interrupted between two of them.
        changes: Steps after which what a phase runs on changed: dotted lines.
        over: Name of the axis, if the points have something else than their steps.
    """
    return render(
        alt, lambda axes, palette: _draw_chart(axes, palette, chart, spans, changes, over)
    )


def write_curves(charts: Sequence[Chart], spans: Sequence[Span], path: Path) -> None:
    """Write a PNG of charts below one another, as `draw_curves` draws them for a light page."""
    draws = [partial(_draw_chart, chart=chart, spans=spans) for chart in charts]
    with open_new(path) as stream:
        stream.write(_png(draws, LIGHT, HEIGHT + PANEL_HEIGHT * (len(charts) - 1)))


def _draw_chart(
    axes: Any,
    palette: Palette,
    chart: Chart,
    spans: Sequence[Span],
    changes: Sequence[int] = (),
    over: str = "step",
) -> None:
    for place, curve in enumerate(chart.curves):
        own = place if curve.place is None else curve.place
        colour = palette.series[own % len(palette.series)]
        points = curve.points[:: -(-len(curve.points) // MOST_POINTS) or 1]
        for number, piece in enumerate(_split(points, spans)):
            label = curve.label if number == 0 else None
            _draw_piece(axes, curve, piece, colour, label)
    axes.set_xlabel(over)
    axes.set_ylabel(chart.name)
    axes.label_outer()
    axes.set_xlim(left=spans[0].first if spans else 0)
    if chart.bottom is not None:
        axes.set_ylim(bottom=chart.bottom)
    if chart.rates:
        axes.yaxis.set_major_formatter(lambda number, _: format_learning_rate(number))
    for step in changes:
        axes.axvline(step, color=palette.soft, linewidth=1, linestyle=":")
    for span in spans[1:]:
        axes.axvline(span.first, color=palette.soft, linewidth=1, linestyle="--")
    for span in spans if axes.get_subplotspec().is_first_row() else ():
        axes.annotate(
            span.phase,
            ((span.first + span.last) / 2, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=palette.soft,
        )
    named = sum(bool(curve.label) for curve in chart.curves)
    if named > 1 or any(curve.label and curve.smooth for curve in chart.curves):
        axes.legend(frameon=False, labelcolor=palette.ink)


def draw_bars(
    alt: str, unit: str, rows: Sequence[str], parts: Mapping[str, Sequence[float]]
) -> Picture:
    """Draw a horizontal bar for each row, which is divided into parts.

    Args:
        alt: What the figure shows, in words.
        unit: Name and unit of the values.
        rows: Names of the bars, from the top.
        parts: Values of each part, one for each bar.
    """

    def draw(axes: Any, palette: Palette) -> None:
        left = [0.0] * len(rows)
        places = range(len(rows), 0, -1)
        for colour, (part, values) in zip(cycle(palette.series), parts.items(), strict=False):
            label = part if len(parts) > 1 else None
            axes.barh(places, values, left=left, height=0.6, color=colour, label=label)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(places, rows)
        axes.set_xlabel(unit)
        if len(parts) > 1:
            axes.legend(
                frameon=False, labelcolor=palette.ink, ncols=4, loc="lower center",
                bbox_to_anchor=(0.5, 1.0), fontsize=9,
            )  # fmt: skip

    return render(alt, draw, height=1.3 + 0.32 * len(rows))


def render(alt: str, draw: Draw, height: float = HEIGHT) -> Picture:
    """Draw a figure twice, for a light and a dark page.

    Args:
        alt: What it shows, in words.
        draw: Draws on matplotlib's axes with the colours of a palette.
        height: Inches.
    """
    return Picture(alt, _png([draw], LIGHT, height), _png([draw], DARK, height))


def format_learning_rate(number: float) -> str:
    """Format a learning rate in its usual short form: 8e-5."""
    if number == 0 or number >= 0.01:
        return f"{number:g}"
    mantissa, _, exponent = f"{number:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def running_mean(values: Sequence[float]) -> list[float]:
    """Compute an exponential running mean, with Adam's bias correction for its start."""
    means: list[float] = []
    total = weight = 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(total / weight)
    return means


def _png(draws: Sequence[Draw], palette: Palette, height: float) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor=palette.paper)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(draws), sharex=True, squeeze=False)[:, 0]
    for axes, draw in zip(panels, draws, strict=True):
        axes.set_facecolor(palette.paper)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(palette.line)
        axes.tick_params(colors=palette.soft)
        axes.xaxis.label.set_color(palette.ink)
        axes.yaxis.label.set_color(palette.ink)
        draw(axes, palette)
    written = BytesIO()
    figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def _draw_piece(
    axes: Any, curve: Curve, points: Sequence[Point], colour: str, label: str | None
) -> None:
    steps, values = [step for step, _ in points], [value for _, value in points]
    mark = "o" if curve.dots or len(points) == 1 else ""
    if not curve.smooth:
        line = "--" if curve.dashed else "-"
        axes.plot(steps, values, line, color=colour, linewidth=1.8, marker=mark, ms=4, label=label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.45, marker=mark, ms=2)
    means = running_mean(values)
    axes.plot(steps, means, color=colour, linewidth=1.8, label=label and f"{label}, running mean")


def _split(points: Sequence[Point], spans: Sequence[Span]) -> list[list[Point]]:
    """Return the points of each phase; those of the step at which two meet count to the first."""
    pieces = []
    edges = [span.first for span in spans[1:]] + [math.inf]
    first = -math.inf
    for edge in edges:
        pieces.append([point for point in points if first < point[0] <= edge])
        first = edge
    return [piece for piece in pieces if piece]
