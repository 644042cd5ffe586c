"""The report of a real run, as it opens from a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.browser.checks import CAPTIONS, FACES, LOOKS, ends, fonts_of, serious_problems, sideways
from tests.browser.conftest import Visits


@pytest.fixture
def report(trained: Path) -> Path:
    """The page of a run that was trained with captions of all scripts."""
    return trained / "report/index.html"


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_report(visits: Visits, report: Path, scheme: str, width: int) -> None:
    """It asks for no other file, needs no scripts, fits the window, and axe-core finds nothing
    serious, with each part of it unfolded."""
    page = visits.open(report.as_uri(), scheme=scheme, width=width, scripts=False)
    assert page.locator("script").count() == 0
    assert page.locator("img").count() > 4
    visits.keep(page, f"{scheme}-{width}")
    # axe-core is a script.
    page = visits.open(report.as_uri(), scheme=scheme, width=width)
    assert sideways(page) <= 0
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert sideways(page) <= 0
    assert serious_problems(page) == []


def test_a_picture_is_enlarged_without_scripts(visits: Visits, report: Path) -> None:
    """A click lets it fill the window, another one or the key Enter closes it."""
    page = visits.open(report.as_uri(), scripts=False)
    small = page.locator("figure img").first.bounding_box()
    page.get_by_label("Enlarge: ").first.click()
    large = page.locator("figure:target img").bounding_box()
    visits.keep(page, "open", full=False)
    assert small
    assert large
    assert large["width"] > 3 * small["width"]
    page.get_by_role("link", name="close").first.press("Enter")
    assert page.locator("figure:target").count() == 0
    assert page.locator("figure img").first.bounding_box()["width"] == small["width"]


def test_captions_in_the_report(visits: Visits, report: Path) -> None:
    """Each is text in letters of its own script, and Arabic is written from right to left."""
    page = visits.open(report.as_uri())
    for script, caption in CAPTIONS.items():
        assert any(FACES[script] in face for face in fonts_of(page, caption)), script
        first, last = ends(page, caption)
        assert (first > last) == (script == "Arabic"), script
