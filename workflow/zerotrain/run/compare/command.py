"""The comparison of runs or phases: tables that fit the terminal, in plain text in a pipe, and a
page; or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact import write_whole
from zerotrain.artifact.layout import RESULTS
from zerotrain.run.compare.differences import Difference, find_differences
from zerotrain.run.compare.facts import VALIDATIONS, Facts, read_facts
from zerotrain.run.compare.page import render_page
from zerotrain.run.compare.rows import Rows, make_rows
from zerotrain.run.compare.sides import find_sides

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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


def _tables(names: Sequence[str], groups: Sequence[Rows], console: Console) -> Iterator[Table]:
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
