"""The conditions of a training and their changes, formatted for report, card and trace.

A difference in them changes only rounding and never restarts a training: docs/exactness.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from zerotrain.state.position import TrainerState

VERSIONS, ENVIRONMENT = "versions.", "env."
"""Prefixes of keys: a package, a variable."""
NAMES = {
    "version": "version of train_phase",
    "threads": "threads per process",
    "recorded": "records",
}
"""Longer names for keys that are unclear by themselves."""
SHORT = 10
"""Digits that are shown of a digest."""
DIGEST = re.compile("[0-9a-f]{64}")
FIRST = ("torch", "cuda", "cudnn", "nccl", "deepspeed", "diffusers", "transformers", "peft")
"""Packages that are shown first, in this order; the others follow."""
BRIEF = ("torch", "diffusers", "transformers")
"""Packages that fit on a line of a trace."""
FULL = "full_determinism"
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Change:
    """One entry of a history."""

    step: int
    """The last step before the change."""
    key: str
    old: Scalar
    new: Scalar

    @property
    def what(self) -> str:
        """Return the key in words."""
        name = self.key.removeprefix(VERSIONS).removeprefix(ENVIRONMENT)
        return NAMES.get(name, name)

    @property
    def values(self) -> tuple[str, str]:
        """Return old and new value as text."""
        return _format_value(self.key, self.old), _format_value(self.key, self.new)

    @property
    def text(self) -> str:
        """Return the entry as a line."""
        return f"after step {self.step:,}: {self.brief}"

    @property
    def brief(self) -> str:
        """Return the entry without its step."""
        return "{} {} → {}".format(self.what, *self.values)


@dataclass(frozen=True)
class RanOn:
    """The conditions of the last steps, and every change before them."""

    step: int
    """Completed steps."""
    values: Mapping[str, Scalar]
    """Values by the keys of TrainerState.ran_on; empty if nothing was recorded."""
    changes: Sequence[Change]
    """Changes in the order of steps."""

    @classmethod
    def of(cls, position: TrainerState) -> RanOn:
        """Read the position of a checkpoint or a state."""
        return cls._read(position.step, position.ran_on, position.history)

    @classmethod
    def of_manifest(cls, made_by: Mapping[str, Any], step: Any) -> RanOn:
        """Read the entries of `made_by` in the manifest of weights; omit entries of other types."""
        return cls._read(step, made_by.get("ran_on"), made_by.get("history"))

    @classmethod
    def of_encoding(cls, software: Mapping[str, Any]) -> RanOn:
        """Read the software that encoded a cache, as named in its records."""
        return cls._read(0, dict(software), [])

    @classmethod
    def _read(cls, step: int, values: Any, history: Any) -> RanOn:
        items = values.items() if isinstance(values, dict) else ()
        kept = {key: value for key, value in items if isinstance(value, Scalar)}
        entries = history if isinstance(history, list) else []
        changes = [
            Change(one["step"], one["key"], one.get("old"), one.get("new"))
            for one in entries
            if isinstance(one, dict)
            and type(one.get("step")) is int
            and isinstance(one.get("key"), str)
        ]
        return cls(
            step if type(step) is int else 0, kept, sorted(changes, key=lambda change: change.step)
        )

    def made_by(self) -> dict[str, Any]:
        """Return the entries for the manifest of weights; empty if nothing was recorded."""
        history = [vars(change) for change in self.changes]
        entries = {"ran_on": dict(self.values), "history": history}
        return {key: value for key, value in entries.items() if value}

    @property
    def exact(self) -> str:
        """Return which steps give the same bits when trained again under recorded conditions."""
        if not self.values:
            return "not recorded"
        compiled = self.values.get("dynamo_backend") == "inductor"
        if self.values.get(FULL) is False and (self.values.get("device") != "cpu" or compiled):
            return f"no step: {FULL} is false"
        if not self.changes:
            return "all steps"
        last = self.changes[-1].step
        what = ", ".join(change.brief for change in self.changes if change.step == last)
        if last >= self.step:
            return f"no step: the last change came after step {last:,}: {what}"
        return f"steps {last + 1:,} to {self.step:,}, since the change after step {last:,}: {what}"

    @property
    def brief(self) -> str:
        """Return the conditions in a few words, then the changes."""
        versions = [
            f"{name} {version}" for name in BRIEF if (version := self.values.get(VERSIONS + name))
        ]
        threads = f"{count} threads" if (count := self.values.get("threads")) else ""
        words = [*versions, str(self.values.get("device") or ""), threads]
        return ", ".join(word for word in [*words, *(c.text for c in self.changes)] if word)

    def rows(self) -> list[tuple[str, str]]:
        """Return labels and short values of the conditions of the last steps."""
        device = ", driver ".join(str(v) for v in map(self.values.get, ("device", "driver")) if v)
        order = {name: place for place, name in enumerate(FIRST)}
        packages = sorted(self._below(VERSIONS), key=lambda one: (order.get(one[0], 99), one[0]))
        rows = [
            ("device", device),
            (NAMES["threads"], str(self.values.get("threads") or "")),
            ("versions", ", ".join(f"{name} {value}" for name, value in packages if value)),
            ("environment", ", ".join(f"{n}={v}" for n, v in self._below(ENVIRONMENT) if v)),
            (NAMES["version"], str(self.values.get("version") or "")),
        ]
        return [row for row in rows if row[1]]

    def _below(self, prefix: str) -> list[tuple[str, Scalar]]:
        return [
            (key.removeprefix(prefix), value)
            for key, value in self.values.items()
            if key.startswith(prefix)
        ]


def as_markdown(ran_on: RanOn) -> str:
    """Format the section of a README or a card; empty if nothing was recorded."""
    rows = ran_on.rows()
    if not rows and not ran_on.changes:
        return ""
    lines = [f"- {label}: {_plain(value)}" for label, value in [("exact", ran_on.exact), *rows]]
    text = "## What it was trained on\n\n" + "\n".join(lines) + "\n"
    if ran_on.changes:
        changes = "\n".join(f"- {_plain(change.text)}" for change in ran_on.changes)
        text += f"\nChanged while it trained:\n\n{changes}\n"
    return text


def _plain(text: str) -> str:
    """Format text on one line, without markup."""
    return escape(" ".join(text.split()), quote=False)


def _format_value(key: str, value: Scalar) -> str:
    if value is None:
        return "unset" if key.startswith(ENVIRONMENT) else "none"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text[:SHORT] if DIGEST.fullmatch(text) else text
