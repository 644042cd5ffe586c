"""A comparison in the terminal: tables that fit its width, in plain text in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zerotrain.evaluation.compare.rows import Rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
