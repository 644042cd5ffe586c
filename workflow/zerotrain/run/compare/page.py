"""A comparison as a page: one HTML file without scripts, in the style of the report, with the
curves of all sides over one another, by steps and by training time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from zerotrain.run.compare.facts import Facts
from zerotrain.run.compare.rows import DIFFERS, Rows
from zerotrain.run.curves import Point
from zerotrain.run.report.figures import Chart, Curve, draw_curves
from zerotrain.run.report.page import open_templates
from zerotrain.run.report.parts import Chapter, Panel, Table
from zerotrain.run.report.samples import (
    Grid,
    compress,
    grid_sizes,
    join_answers,
    join_grids,
)

TEMPLATE = "compare.html.j2"


def render_page(sides: Sequence[Facts], groups: Sequence[Rows]) -> str:
    """Return the page's HTML: curves, the table, and the samples of the same prompts."""
    sources = [(side.name, side.evaluation) for side in sides if side.evaluation]
    sizes = dict.fromkeys(size for _, evaluation in sources for size in grid_sizes(evaluation))
    grids: list[Grid] = [join_grids(size, sources, {}) for size in sizes]
    grids, _, compressed = compress(grids, [])
    names = [side.name for side in sides]
    template = open_templates(Path(__file__).parent).get_template(TEMPLATE)
    return template.render(
        names=names,
        curves=draw_chapter(sides),
        numbers=[
            Panel(one.title.capitalize(), table=Table(one.rows, ["", *names], numbers=True))
            for one in groups
            if one.title != DIFFERS
        ],
        differs=[Table(one.rows, ["", *names]) for one in groups if one.title == DIFFERS],
        grids=grids,
        answers=join_answers(sources),
        compressed=compressed,
        missing=[sentence for side in sides for sentence in side.missing],
    )


CURVES = {
    "Training loss": ("loss",),
    "Validation loss": ("val_loss", "val_loss_ema"),
    "Learning rate": ("learning_rate",),
}
"""Keys of the log by the title of their figure."""
EMA = "val_loss_ema"
AXES: dict[str, Callable[[Point], float]] = {
    "step": lambda point: point.step,
    "training time in minutes": lambda point: point.seconds / 60,
}


def draw_chapter(sides: Sequence[Facts]) -> Chapter:
    """Draw each curve over each axis; a sentence names those that no side has."""
    panels = [panel for title in CURVES for panel in _panels(title, sides)]
    missing = [
        f"No side has the curve {title.lower()}."
        for title, keys in CURVES.items()
        if not any(side.curves.points(key) for side in sides for key in keys)
    ]
    return Chapter("curves", "Curves", panels, missing)


def _panels(title: str, sides: Sequence[Facts]) -> Iterator[Panel]:
    found = [
        (place, key, points)
        for place, side in enumerate(sides)
        for key in CURVES[title]
        if (points := side.curves.points(key))
    ]
    if not found:
        return
    have = {place for place, _, _ in found}
    lacking = [side.name for place, side in enumerate(sides) if place not in have]
    text = [f"Without this curve: {', '.join(lacking)}."] if lacking else []
    for axis, place_of in AXES.items():
        curves = [
            Curve(
                sides[place].name + (" (EMA)" if key == EMA else ""),
                [(place_of(point), point.value) for point in points],
                smooth=title == "Training loss",
                dots=title == "Validation loss",
                dashed=key == EMA,
                place=place,
            )
            for place, key, points in found
        ]
        of = f"{title} of {', '.join(curve.label for curve in curves)} over {axis}"
        chart = Chart(title.lower(), curves, rates=title == "Learning rate")
        picture = draw_curves(of, chart, [], over=axis)
        yield Panel(f"{title} by {axis.partition(' in')[0]}", text, picture)
