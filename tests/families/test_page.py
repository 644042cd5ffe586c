"""docs/families.md: its table is that of the families."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.families.promises import LINE, TOY
from tests.pages.tables import families_table, replace_generated

PAGE = ROOT / "docs" / "families.md"


def test_the_table_is_that_of_the_families(generated):
    """`--fix` writes it."""
    generated(PAGE, replace_generated(PAGE.read_text(), "families", families_table()))


def test_what_it_says_of_the_toy_is_so():
    """The line that a test adds, and how short the file is."""
    page = PAGE.read_text()
    assert LINE in page
    assert f"in {len(TOY.read_text().splitlines())} lines" in page
