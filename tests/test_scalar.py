"""Any value is one line of YAML and any text one comment, for YAML 1.1 and 1.2 alike."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from zerotrain.config.scalar import one_line, scalar

BREAKS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
HOSTILE = [*BREAKS, "\0", "\x1b[2J", "\x7f", "\x9b", "\u202e", "\ufeff", "\ufffe", "\ud800"]
WORDS = ["#", "# ", ": ", "- ", "'", '"', "\\", "%", "&a", "*a", "!!python/object:os.system", "<<"]
PLAIN = ["no", "1e-4", "0o17", "1:30", "~", "", " ", "2020-01-01", "é", "\U0001f600", "\t", "run"]
TEXTS = st.lists(st.sampled_from([*HOSTILE, *WORDS, *PLAIN]) | st.text(max_size=3), max_size=6).map(
    "".join
)
VALUES = st.recursive(
    TEXTS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
READERS = [yaml.safe_load, lambda text: YAML(typ="safe", pure=True).load(text)]


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(VALUES)
def test_a_value_is_one_line_for_every_reader(value: Any) -> None:
    """What is written is read again, whatever it holds, and adds no key."""
    line = f"{{a: {scalar(value)}, b: 1}}"
    assert line.splitlines() == [line]
    line.encode()
    for read in READERS:
        assert read(line) == {"a": value, "b": 1}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TEXTS)
def test_a_text_is_one_comment(text: str) -> None:
    """A comment ends where its line does, for every reader of YAML."""
    written = f"# {one_line(text)}\na: 1 # {one_line(text)}\nb: 2\n"
    assert len(written.splitlines()) == 3
    written.encode()
    for read in READERS:
        assert read(written) == {"a": 1, "b": 2}


@pytest.mark.parametrize("text", ["a red house", "Zürich, 5 €", "C:\\images", "日本"])
def test_plain_text_stays_as_it_is(text: str) -> None:
    """Nothing is escaped that a person can read."""
    assert one_line(text) == text


@pytest.mark.parametrize(("value", "line"), [(float("inf"), ".inf"), (float("-inf"), "-.inf")])
def test_numbers_without_end_stay_numbers(value: float, line: str) -> None:
    """JSON's word for them would be text."""
    assert scalar(value) == line
    assert scalar(float("nan")) == ".nan"


def test_a_date_is_written_as_it_was() -> None:
    """YAML of others has dates where their keys are text."""
    assert scalar(datetime.date(2026, 1, 2)) == "2026-01-02"
    assert scalar({"day": datetime.datetime(2026, 1, 2, 3)}) == "{day: 2026-01-02 03:00:00}"
