"""A comparison as a page: one HTML file without scripts, in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerotrain.evaluation.compare.curves import draw_chapter
from zerotrain.evaluation.compare.facts import Facts
from zerotrain.evaluation.compare.rows import DIFFERS, Rows
from zerotrain.evaluation.report.page import open_templates
from zerotrain.evaluation.report.parts import Panel, Table
from zerotrain.evaluation.report.samples import (
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
