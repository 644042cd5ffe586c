"""A training that was planned, started and switched on the page: the page of its run, its report.

One file, as a worker takes whole files and the training is made once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.browser.builder_server import Builder
from tests.browser.checks import CAPTIONS, FACES, LOOKS, check_look, ends, fonts_of
from tests.browser.conftest import Visits
from tests.browser.training import RUN, SMALL

from zerotrain import artifact

SHEET = 718
"""Width in CSS pixels of what a browser prints on A4 with its default margins."""


def test_a_configuration_of_the_page_trains_to_weights(trained: Path) -> None:
    """Of both phases, to the last step."""
    first, last = phases_of(trained)
    for phase in (first, last):
        artifact.read(trained / phase / "weights", "weights")
    metrics = json.loads((trained / last / "metrics.json").read_text())
    assert metrics["step"] == int(SMALL["phase.until"])


def test_it_was_switched_while_it_ran(trained: Path) -> None:
    """The first phase ends where the training was stopped, and PyTorch continues from there."""
    config = yaml.safe_load((trained.parents[1] / f"config/{RUN}.yaml").read_text())
    first, last = config["phases"]
    assert 0 < first["until"] < last["until"] == int(SMALL["phase.until"])
    presets = [phase.get("launch", config.get("launch")) for phase in (first, last)]
    assert [p if isinstance(p, str) else p["preset"] for p in presets] == ["zero2_offload", "torch"]
    lines = (trained / last["name"] / "progress/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    ends = {phase: [r["step"] for r in rows if r["phase"] == phase] for phase in phases_of(trained)}
    assert max(ends[first["name"]]) <= first["until"] < min(ends[last["name"]])


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_run_page(visits: Visits, builder: Builder, trained: Path, scheme: str, width: int) -> None:
    """It fits the window, and axe-core finds nothing serious."""
    page = visits.open(builder.address(f"/runs/{RUN}"), scheme=scheme, width=width)
    visits.keep(page, f"{scheme}-{width}")
    check_look(page)


def phases_of(run: Path) -> list[str]:
    """Names of a run's phases, in order."""
    config = yaml.safe_load((run.parents[1] / f"config/{run.name}.yaml").read_text())
    return [phase["name"] for phase in config["phases"]]


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
    check_look(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_on_paper(visits: Visits, report: Path, scheme: str) -> None:
    """Black on white whatever the screen's colours, no wider than a sheet of A4, and without the
    links that only a screen needs; what is folded is printed folded."""
    page = visits.open(report.as_uri(), scheme=scheme, width=SHEET)
    page.emulate_media(media="print")
    visits.keep(page, f"{scheme}-{SHEET}")
    check_look(page)
    ink, paper = (
        page.locator("body").evaluate(f"body => getComputedStyle(body).{one}")
        for one in ("color", "backgroundColor")
    )
    assert (ink, paper) == ("rgb(28, 31, 35)", "rgb(255, 255, 255)")
    assert not page.locator("nav").is_visible()


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
