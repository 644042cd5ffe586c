"""A default that changes is an edit of every run that relies on it: none changes unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "tests/golden/defaults.json"
"""Defaults of the last release, by section and key."""


def defaults() -> dict[str, Any]:
    """The present defaults, by section and key."""
    schema = json.loads((ROOT / "config/schema.json").read_text())
    sections = {"": schema, **schema["$defs"]}
    return {
        f"{name}.{key}".lstrip("."): found["default"]
        for name, section in sorted(sections.items())
        for key, found in sorted(section.get("properties", {}).items())
        if "default" in found and not isinstance(found["default"], dict)  # sections of their own
    }


def unannounced(old: dict[str, Any], new: dict[str, Any], changelog: str) -> list[str]:
    """Defaults that changed or went away without a line of the changelog."""
    present = changelog.partition("## [Unreleased]")[2].partition("\n## [")[0]
    changed = [
        key for key in old if json.dumps(old[key]) != json.dumps(new.get(key, ...), default=str)
    ]
    return [key for key in changed if f"Default of `{key.rpartition('.')[2]}`" not in present]


def test_defaults_are_those_of_the_last_release(request: pytest.FixtureRequest) -> None:
    """A change needs a line "Default of `KEY`: ..." in CHANGELOG.md before `--fix` writes it."""
    old = json.loads(RELEASED.read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert not unannounced(old, defaults(), changelog)
    if request.config.getoption("--fix"):
        RELEASED.write_text(json.dumps(defaults(), indent=1) + "\n")
    missing = defaults().keys() - json.loads(RELEASED.read_text()).keys()
    assert not missing, f"{RELEASED} lacks new keys: make test ARGS=--fix"


def test_a_changed_default_is_noticed() -> None:
    """Until it is announced."""
    old, new = {"TrainConfig.seed": 1, "TrainConfig.keep": 2}, {"TrainConfig.seed": 2}
    log = (
        "## [Unreleased]\n- Default of `seed`: 1 -> 2.\n\n## [1.0.0]\n- Default of `keep`: gone.\n"
    )
    assert unannounced(old, new, log) == ["TrainConfig.keep"]
