"""A training that was planned, started and switched on the page, and the page of its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.browser.builder_server import Builder
from tests.browser.checks import LOOKS, serious_problems, sideways
from tests.browser.conftest import Visits
from tests.browser.training import RUN, SMALL

from zerotrain import artifact


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
    assert sideways(page) <= 0
    assert serious_problems(page) == []


def phases_of(run: Path) -> list[str]:
    """Names of a run's phases, in order."""
    config = yaml.safe_load((run.parents[1] / f"config/{run.name}.yaml").read_text())
    return [phase["name"] for phase in config["phases"]]
