"""The comparison of runs or phases: a table in the terminal, and a page; or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerotrain.artifact import write_whole
from zerotrain.artifact.layout import RESULTS
from zerotrain.evaluation.compare.differences import Difference, find_differences
from zerotrain.evaluation.compare.facts import VALIDATIONS, Facts, read_facts
from zerotrain.evaluation.compare.page import render_page
from zerotrain.evaluation.compare.rows import make_rows
from zerotrain.evaluation.compare.sides import find_sides
from zerotrain.evaluation.compare.terminal import print_comparison

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
                "curves": {key: points for key in keys if (points := side.curve(key))},
                "missing": side.missing,
            }
            for side in sides
        ],
        "differences": [asdict(one) for one in differences],
    }
