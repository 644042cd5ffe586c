"""Differences between a folder and its recipe, as a plan words them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotrain.artifact.recipe import (
    NOT_SET,
    Difference,
    Recipe,
    differences,
    format_differences,
)
from zerotrain.config.read import parse_config
from zerotrain.graph.artifacts import Planned
from zerotrain.graph.currency import Currency
from zerotrain.graph.terminal.reasons import describe

CONFIG = {
    "run": "one", "base": "nano", "data": {"source": "digits"}, "train": {"resolution": 32},
    "phases": [{"name": "plain", "until": 10}, {"name": "big", "until": 20}],
}  # fmt: skip
PHASES = [{"name": "plain", "train": {"lr": 1.0}}, {"name": "big", "train": {"lr": 1.0}}]


def words(*found: Difference, phase: str = "") -> list[str]:
    """The description of a cache with these differences."""
    run = parse_config(CONFIG, "a.yaml")
    dataset = {"dataset": Path("results/data/one")}
    file = Path("settings.json")
    planned = Planned("evaluate", (Path("results/one/x"),), file, run, phase, inputs=dataset)
    return describe(Currency(planned, differences=[*found]))


def recipe(**changes: object) -> Recipe:
    """A recipe with other parts."""
    return Recipe(**({"stage": "a", "version": 1, "settings": {}, "inputs": {}} | changes))  # type: ignore[arg-type]


def test_settings_are_compared_by_key_and_by_phase() -> None:
    """Nested values by dotted key; a phase that came or went as a whole; equal ones not at all."""
    old = recipe(settings={"seed": 1, "cache": {"dtype": "fp32"}, "phases": PHASES})
    changed = [PHASES[0], {"name": "big", "train": {"lr": 2.0}}, {"name": "third"}]
    new = recipe(settings={"seed": 1, "cache": {}, "phases": changed})
    assert differences(old, old) == []
    assert differences(old, new) == [
        Difference("settings", "cache.dtype", "fp32", NOT_SET),
        Difference("settings", "train.lr", 1.0, 2.0, "big"),
        Difference("settings", "phase", NOT_SET, "third"),
    ]


def test_entries_with_names_are_compared_by_name_and_in_their_order() -> None:
    """Those of data.sources, which are no phases: the order of sources is that of samples."""
    cats, dogs = {"name": "cats", "repeats": 2}, {"name": "dogs"}
    old = recipe(settings={"data": {"sources": [cats, dogs]}})

    def found(*sources: dict[str, object]) -> list[Difference]:
        return differences(old, recipe(settings={"data": {"sources": [*sources]}}))

    key = "data.sources"
    assert found(cats | {"repeats": 3}, dogs) == [
        Difference("settings", f"{key}.cats.repeats", 2, 3)
    ]
    assert found(cats) == [Difference("settings", f"{key}.dogs", dogs, NOT_SET)]
    assert found(dogs, cats) == [Difference("settings", key, ["cats", "dogs"], ["dogs", "cats"])]


def test_an_unknown_input_differs_from_none() -> None:
    """One that is made again may come out as it was; a known other one differs, and one that is
    none any more."""
    old = recipe(inputs={"base": "a" * 64, "dataset": "b" * 64})
    assert differences(old, recipe(inputs={"base": "unknown", "dataset": "b" * 64})) == []
    found = differences(old, recipe(inputs={"base": "c" * 64}))
    assert [(one.kind, one.key, one.new) for one in found] == [
        ("input", "base", "c" * 64), ("input", "dataset", NOT_SET),
    ]  # fmt: skip


def test_another_stage_and_no_recipe_differ_whatever_else_is_equal() -> None:
    """Of a folder that another program, or a command by hand, has put there."""
    assert differences(None, recipe()) == [Difference("input", "a")]
    assert differences(recipe(stage="b"), recipe()) == [Difference("input", "a")]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Difference("settings", "train.lr", 1e-3, 2e-3), "train.lr 0.001 -> 0.002"),
        (Difference("settings", "lora", NOT_SET, {"rank": 4}), "lora not set -> rank: 4"),
        (Difference("settings", "ema", False, None), "ema false -> not set"),
        (Difference("settings", "norm", [], ["a"]), 'norm [] -> ["a"]'),
        (Difference("settings", "x", "d" * 64, "e" * 41), f"x {'d' * 12} -> {'e' * 37}..."),
        (Difference("version", "evaluate", 1, 2), "its stage has version 2, 1 before"),
        (Difference("input", "dataset", "a", "b"), "changed: results/data/one"),
        (Difference("input", "images", "a", "b"), "changed: images"),
        (
            Difference("file", "a/b.bin", new="listed in manifest.json but missing"),
            "missing: a/b.bin",
        ),
        (Difference("file", "a/b.bin", new="3 bytes, manifest.json says 4"), "damaged: a/b.bin"),
    ],
)
def test_each_kind_of_difference_has_its_words(found: Difference, said: str) -> None:
    """The key with both values, the folder or the group of files, the file."""
    assert words(found) == [said]


def test_a_value_names_its_phase_unless_it_is_the_jobs_or_every_one() -> None:
    """The job's name has the first already."""
    one, other = (Difference("settings", "until", 1, 2, name) for name in ("plain", "big"))
    assert words(one) == ["until 1 -> 2 (phase plain)"]
    assert words(one, phase="plain") == ["until 1 -> 2"]
    assert words(one, other) == ["until 1 -> 2"]


def test_more_than_a_few_values_are_counted() -> None:
    """A line stays a line."""
    many = [Difference("settings", f"k{number}", 1, 2) for number in range(6)]
    assert words(*many)[-1] == "2 more changed"
    assert len(words(*many)) == 5
    assert format_differences(many, 2) == "k0 1 -> 2; k1 1 -> 2; 4 more"
    assert format_differences(many, 6).endswith("; k5 1 -> 2")
