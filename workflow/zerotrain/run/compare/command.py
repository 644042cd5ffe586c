"""The comparison of runs or phases: tables that fit the terminal, in plain text in a pipe, and a
page; or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact import write_whole
from zerotrain.artifact.layout import RESULTS
from zerotrain.evaluation.results import LABELS, compare_metrics, format_metric
from zerotrain.launch.resolved import FILES, leaves
from zerotrain.run.compare.sides import (
    EVALUATION,
    OF_DATA,
    PHASES,
    RAN_ON,
    VALIDATIONS,
    Facts,
    Values,
    find_sides,
    read_facts,
)
from zerotrain.run.curves import Point
from zerotrain.run.report.figures import (
    Chapter,
    Chart,
    Curve,
    Panel,
    Table,
    draw_curves,
    format_learning_rate,
)
from zerotrain.run.report.page import open_templates
from zerotrain.run.report.samples import (
    Grid,
    compress,
    grid_sizes,
    join_answers,
    join_grids,
)

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console


GROUPS = (PHASES, *FILES, OF_DATA, EVALUATION, RAN_ON)
ABSENT = "absent"
"""The value of a key that a mapping does not have, such as an argument of a scheduler."""
Recorded = Sequence[Sequence[Values] | None]
"""The values of each phase of each side; None: the side has no record of them."""
Columns = Sequence[Sequence[Any] | None]
"""The values of a key by side, as in a Difference."""


@dataclass(frozen=True)
class Difference:
    """A key whose values differ."""

    group: str
    key: str
    values: Columns
    """The values of each side: of its phases in order, without repetitions; one for what a run has
    once. None: the side has no record of it."""


def find_differences(sides: Sequence[Facts]) -> list[Difference]:
    """Return the keys that differ, in the order of the groups and of run.yaml.

    All values are resolved: where a default changed between versions, it differs, too.
    """
    return [
        Difference(group, key, values)
        for group in GROUPS
        for key, values in _compare(group, sides)
        if _differ(values)
    ]


def _compare(group: str, sides: Sequence[Facts]) -> Iterator[tuple[str, Columns]]:
    """Yield the values of each key of a group; of a section, those of each key inside."""
    recorded = [side.groups.get(group) for side in sides]
    chosen = {key for side in sides for key in side.chosen if key.startswith(f"{group}.")}
    for key in _keys(recorded):
        columns = _columns(recorded, key, lacking=group in (PHASES, *FILES))
        if key in chosen:  # otherwise a phase without DeepSpeed lacks only its defaults
            columns = [[ABSENT] if column is None else column for column in columns]
        kinds = {isinstance(value, Mapping) for column in columns for value in column or ()}
        if kinds != {True}:
            yield key, columns
        if True in kinds:
            sections = [_section(phases, key) for phases in recorded]
            for name in _keys(sections):
                yield name, _columns(sections, name, lacking=True)


def _section(phases: Sequence[Values] | None, key: str) -> list[Values] | None:
    """Return the leaves of a section in each phase that has it; None if no phase has."""
    found = [values[key] for values in phases or () if isinstance(values.get(key), Mapping)]
    return [dict(leaves(one, f"{key}.")) for one in found] or None


def _columns(recorded: Recorded, key: str, *, lacking: bool) -> Columns:
    """Return the values of a key of each side, over its phases; equal ones in a row once.

    Args:
        recorded: The values by side and phase.
        key: The key.
        lacking: Whether a missing key is a value, ABSENT; otherwise it is not recorded.
    """
    return [
        None
        if phases is None or not (lacking or any(key in values for values in phases))
        else [value for value, _ in groupby(values.get(key, ABSENT) for values in phases)]
        for phases in recorded
    ]


def _keys(recorded: Recorded) -> list[str]:
    return list(dict.fromkeys(key for one in recorded for values in one or () for key in values))


def _differ(columns: Columns) -> bool:
    known = [column for column in columns if column is not None]
    return any(column != known[0] for column in known)


LOGGED = {
    "step": "step",
    "samples": "samples seen",
    "last_loss": "training loss, last logged",
    "last_val_loss": "validation loss, last",
    "lowest_val_loss": "validation loss, lowest",
    "last_val_loss_ema": "validation loss of the EMA, last",
    "lowest_val_loss_ema": "validation loss of the EMA, lowest",
}
"""Labels of what the log has."""
DIFFERS = "what differs"
NONE = "-"
LONGEST = 60
"""Letters of a value that are shown."""


@dataclass(frozen=True)
class Rows:
    """Rows under a title: a name, and a cell for each side."""

    title: str
    rows: Sequence[Sequence[str]]


def make_rows(sides: Sequence[Facts], differences: Sequence[Difference]) -> list[Rows]:
    """Return the table: what was logged, the metrics of the evaluations, what differs."""
    logged = [side.logged for side in sides]
    groups = [
        Rows(
            "log",
            [
                [label, *(_cell(name, one.get(name)) for one in logged)]
                for name, label in LOGGED.items()
                if any(name in one for one in logged)
            ],
        ),
        Rows("evaluation", _metrics(sides, learned=True)),
        Rows("time and memory", [_times(logged), *_metrics(sides, learned=False)]),
        Rows(DIFFERS, [[one.key, *map(_values, one.values)] for one in differences]),
    ]
    return [group for group in groups if group.rows]


def _times(logged: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the row of training times, of which the metrics of an evaluation have the parts."""
    name = "train_seconds"
    return [LABELS[name], *(_cell(name, one.get(name)) for one in logged)]


def _metrics(sides: Sequence[Facts], *, learned: bool) -> list[list[str]]:
    rows = compare_metrics([side.metrics for side in sides], learned=learned)
    return [[row[0], *(cell or NONE for cell in row[1:])] for row in rows]


def _cell(name: str, value: Any) -> str:
    return NONE if value is None else format_metric(name, value)


def _values(values: Sequence[Any] | None) -> str:
    """Format the values of a side; those of several phases with arrows between them."""
    return NONE if values is None else " -> ".join(map(format_value, values))


def format_value(value: Any) -> str:
    """Format a value of the configuration on one line."""
    if isinstance(value, str):
        text = " ".join(value.split())
    elif isinstance(value, float):
        text = format_learning_rate(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key}: {format_value(inside)}" for key, inside in value.items()) or "{}"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


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


PAGE = "compare.html"


def compare(names: Sequence[str], output: Path | None, *, as_json: bool) -> None:
    """Compare runs or phases as they are now.

    Args:
        names: What find_sides takes.
        output: File of the page; by default results/compare.html.
        as_json: Whether to print JSON instead of the table.

    Raises:
        PipelineError: a name is unknown, or a folder is damaged.
    """
    sides = [read_facts(side) for side in find_sides(names)]
    differences = find_differences(sides)
    if as_json:
        print(json.dumps(document(sides, differences), indent=1, ensure_ascii=False))
        return
    rows = make_rows(sides, differences)
    missing = [sentence for side in sides for sentence in side.missing]
    print_comparison([side.name for side in sides], rows, missing)
    write_whole(path := output or RESULTS / PAGE, render_page(sides, rows))
    print(f"page  {path}")


def document(sides: Sequence[Facts], differences: Sequence[Difference]) -> dict[str, Any]:
    """Return the comparison as JSON has it; a point of a curve is step, seconds and value."""
    keys = ("loss", "learning_rate", *VALIDATIONS)
    return {
        "sides": [
            {
                "name": side.name,
                "folder": str(side.folder),
                "log": side.logged,
                "metrics": side.metrics,
                "curves": {key: points for key in keys if (points := side.curves.points(key))},
                "missing": side.missing,
            }
            for side in sides
        ],
        "differences": [asdict(one) for one in differences],
    }


LEAST_CELL = 11
"""Columns that a side takes at least; sides that do not fit next to each other follow below."""
NAMES = 34
"""Columns that the names of the rows take at most where the sides need the rest."""


def print_comparison(
    names: Sequence[str], groups: Sequence[Rows], sentences: Sequence[str]
) -> None:
    """Print the table, and sentences below it; rich finds the width, and whether it is a terminal.

    Args:
        names: The sides.
        groups: The table.
        sentences: What is missing.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    for number, table in enumerate(_tables(names, groups, console)):
        if number:
            console.print()
        console.print(table)
    for sentence in sentences:
        console.print(Text(sentence))


def _tables(
    names: Sequence[str], groups: Sequence[Rows], console: Console
) -> Iterator[rich.table.Table]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    left = console.width - 1 - len(names) * (LEAST_CELL + 2)
    named = min(max(NAMES, left), max(len(row[0]) for group in groups for row in group.rows))
    blocks = -(-len(names) // max(1, (console.width - 1 - named) // (LEAST_CELL + 2)))
    each = -(-len(names) // blocks)
    for first in range(0, len(names), each):
        places = range(first, min(first + each, len(names)))
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
        table.add_column("", max_width=named, overflow="fold")
        for place in places:
            table.add_column(Text(names[place]), overflow="fold", justify="right")
        for group in groups:
            table.add_row(Text(group.title, style="bold"))
            for row in group.rows:
                cells = [Text(row[place + 1]) for place in places]
                table.add_row(Text(row[0]), *cells, end_section=row is group.rows[-1])
        yield table
