"""Each transform of a value, by its name in the tables, and the conditions of rows."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders.refusals import refusal

from zerotrain.importers import keys as tables
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.key_values import TRANSFORMS, drop_dependents, put_row
from zerotrain.launch.keys import Key

ROWS = [
    row
    for name in ("TRAINER", "DIFFSYNTH", "SIMPLETUNER", "SIMPLETUNER_DATASET", "LYCORIS",
                 "KOHYA_DATASET", "DIFFUSERS")
    for row in getattr(tables, name).values()
]  # fmt: skip
NOTED = {"no_effect": "no-op", "nothing": "kept", "differs": "changed"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("in_list", "a cat", ["a cat"]),
        ("to_upper", "lokr", "LOKR"),
        ("to_names", "to_q, to_k,", ["to_q", "to_k"]),
        ("to_object", '{"min_lr": 1e-6}', {"min_lr": 1e-6}),
        ("to_object", "[1]", "key: '[1]' is not JSON of keys with values"),
        ("to_positive", 0.5, 0.5),
        ("to_positive", 0, "key is 0 (Hint: give a number above 0)"),
        ("to_alpha", True, "alpha"),
        ("to_extension", "txt", ".txt"),
        ("to_extension", ".caption", ".caption"),
    ],
)
def test_a_transform(name: str, value: Any, expected: Any) -> None:
    """Of a value, or the refusal of one that is out of range."""
    if name in ("to_object", "to_positive") and isinstance(expected, str):
        assert expected.partition(" (")[0] in refusal(TRANSFORMS[name], "key", value)
    else:
        assert TRANSFORMS[name]("key", value) == expected


def test_the_tables_name_transforms_and_keys_that_exist() -> None:
    """And every transform is in a table."""
    assert {row.to for row in ROWS} == {"", *TRANSFORMS, *NOTED}
    assert all(row.otherwise for row in ROWS if row.with_)


@pytest.mark.parametrize("to", NOTED)
def test_a_row_that_sets_nothing_is_noted(to: str) -> None:
    """Without a value of ours."""
    result = ImportedConfig()
    put_row(Key("a", "number", ours="train.a", to=to, says="why"), 3, result)
    assert [(note.outcome, note.reason) for note in result.notes] == [(NOTED[to], "why")]
    assert not result.values


@pytest.mark.parametrize(
    ("condition", "state", "stays"),
    [("b", {"b": 1}, True), ("b", {}, False), ("b = x", {"b": "X"}, True), ("b = x", {}, False)],
)
def test_a_key_that_means_nothing_without_another_is_dropped(
    condition: str, state: dict[str, Any], stays: bool
) -> None:
    """Which the report says."""
    result, arguments = ImportedConfig(), {"a": 3}
    row = Key("a", "number", with_=condition, otherwise="no b")
    drop_dependents(arguments, {"a": row}, result, **state)
    assert ("a" in arguments) is stays
    assert [note.reason for note in result.notes] == ([] if stays else ["no b"])
