"""docs/importing.md has every key of the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.pages.tables import IMPORTED, importing_tables, replace_generated

PAGE = Path(__file__).parents[2] / "docs" / "importing.md"


def test_tables_are_current(generated: Callable[[Path, str], None]) -> None:
    """The page's tables are written from the table of keys."""
    generated(PAGE, replace_generated(PAGE.read_text(), "tables", importing_tables()))


def test_every_key_has_its_reason() -> None:
    """What is not honoured says why."""
    for title, (_, table) in IMPORTED.items():
        for key in table.values():
            assert key.reason or key.fate in ("mapped", "passed_through"), (title, key.name)
            assert (
                key.ours
                or key.fate in ("ignored_no_effect", "dropped", "refused")
                or (key.type == "section")
            ), (title, key.name)
