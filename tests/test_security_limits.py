"""docs/security.md says the limits that the code has."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "docs/security.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [^|]+ \| ([\d,]+)( [MGK]iB)? \| `([\w.]+)` \|$", TEXT, re.MULTILINE)
UNITS = {"": 1, " KiB": 2**10, " MiB": 2**20, " GiB": 2**30}


@pytest.mark.parametrize(("number", "unit", "constant"), ROWS, ids=lambda text: str(text))
def test_a_limit_is_that_of_the_code(number: str, unit: str, constant: str) -> None:
    """By the constant that the row names."""
    module, _, name = constant.rpartition(".")
    found = getattr(importlib.import_module(f"zerotrain.{module}"), name)
    assert found == int(number.replace(",", "")) * UNITS[unit]


def test_every_row_is_compared() -> None:
    """None is written in another way."""
    table = TEXT.partition("## Limits")[2].partition("\n## ")[0]
    assert len(ROWS) == table.count("\n| ") - 1 >= 15
