"""What changed of a job's parameters, by key, from values that are recorded without names."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.pipeline.terminal.changes import describe_changes


def phase(name: str, rate: float = 1e-4, preset: str = "torch", **more: Any) -> dict[str, Any]:
    """A phase as its rule's parameters hold it."""
    return {"name": name, "launch": {"preset": preset}, "train": {"learning_rate": rate}, **more}


TWO = [phase("a"), phase("b")]


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ({"seed": 1}, {"seed": 2}, ["seed 1 -> 2"]),
        ({"seed": 1, "rank": 1}, {"seed": 1, "rank": 2}, ["rank 1 -> 2"]),
        ({"lora": None}, {"lora": {"rank": 8, "alpha": None}}, ["lora none -> rank: 8"]),
        ({"lora": {"rank": 8}}, {"lora": {"rank": 16}}, ["lora.rank 8 -> 16"]),
        (
            {"export": {"dtype": "fp32"}, "seed": 1},
            {"export": {"dtype": "bf16"}, "seed": 2},
            ["export.dtype fp32 -> bf16", "seed 1 -> 2"],
        ),
        (
            {"lora": None, "export": {"dtype": "fp32"}},
            {"lora": {"rank": 8}, "export": {"dtype": "bf16"}},
            ["lora none -> rank: 8", "export.dtype fp32 -> bf16"],
        ),
        ({"a": {}}, {"a": {"b": 0.1}}, ["a.b not set -> 0.1"]),
        ({"a": 1}, {"a": 1.0}, ["a 1 -> 1"]),
        ({"a": True}, {"a": False}, ["a True -> False"]),
        ({"a": 0.1}, {"a": 0.30000000000000004}, ["a 0.1 -> 0.30000000000000004"]),
        ({"a": "x" * 50}, {"a": "y"}, [f"a {'x' * 37}... -> y"]),
        (
            {"a": {str(one): one for one in range(9)}},
            {"a": {str(one): -one for one in range(9)}},
            ["a.1 1 -> -1", "a.2 2 -> -2", "a.3 3 -> -3", "a.4 4 -> -4", "4 more changed"],
        ),
        ({"phases": TWO}, {"phases": TWO}, []),
        (
            {"phases": TWO, "seed": 1},
            {"phases": [phase("a", 2e-4), phase("b", 2e-4)], "seed": 1},
            ["train.learning_rate 0.0001 -> 0.0002"],
        ),
        (
            {"phases": TWO},
            {"phases": [phase("a", 2e-4), phase("b")]},
            ["train.learning_rate 0.0001 -> 0.0002 (phase a)"],
        ),
        (
            {"phases": TWO},
            {"phases": [phase("a"), phase("b", preset="zero2")]},
            ["launch.preset torch -> zero2"],
        ),
        ({"phases": TWO}, {"phases": [*TWO, phase("c")]}, ["phase not set -> c"]),
        ({"phases": TWO}, {"phases": TWO[:1]}, ["phase b -> not set"]),
    ],
)
def test_changed_values_are_named_with_both_values(old, new, changed):
    """Of phase b's job: its own name is not repeated, and a change of all phases is one line."""
    recorded = sorted(map(repr, old.values()))
    assert describe_changes(recorded, new, "b") == changed


def test_a_value_of_another_version_is_text():
    """What cannot be read as a value is shown as it was recorded."""
    assert describe_changes(["<object at 1>"], {"a": 1}) == ["a <object at 1> -> 1"]
