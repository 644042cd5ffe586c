"""docs/families.md: its table is that of the families."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.families.promises import TOY, TOY_SPEC
from tests.pages.tables import families_table, replace_generated

PAGE = ROOT / "docs" / "families.md"


def test_the_table_is_that_of_the_families(generated):
    """`--fix` writes it."""
    generated(PAGE, replace_generated(PAGE.read_text(), "families", families_table()))


def test_what_it_says_of_the_toy_is_so():
    """How short its files are."""
    lines = sum(len(file.read_text().splitlines()) for file in (TOY, TOY_SPEC))
    assert f"in {lines} lines" in PAGE.read_text()
