"""The table of keys: what becomes of each key and flag of the programs that we import from.

Its rows stand in the modules keys_*. Every reader looks its keys up there, docs/importing.md is
written from them, and a test holds them against accelerate's and DeepSpeed's own classes.
A key that is not there is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerotrain.errors import PipelineError

Kind = Literal["whole", "number", "flag", "text", "list", "section", "block"]
"""A section's keys stand in the table too; a block is taken or refused as a whole."""

Fate = Literal["honoured", "passed on", "no-op", "left out", "refused"]


@dataclass(frozen=True)
class Key:
    """One row of the table."""

    name: str
    """Its path in the file, sections joined by dots; a flag without its dashes."""
    kind: Kind
    fate: Fate
    ours: str = ""
    """Our key that says the same."""
    reason: str = ""
    default: Any = None
    """What the program takes where the key is absent; None where that depends."""


def honoured(name: str, kind: Kind, ours: str, default: Any = None, reason: str = "") -> Key:
    """One of our keys says the same."""
    return Key(name, kind, "honoured", ours, reason, default)


def passed(name: str, kind: Kind, default: Any = None, under: str = "launch.deepspeed") -> Key:
    """Goes into the launch file as it is, where it differs from what stands there anyway."""
    return Key(name, kind, "passed on", f"{under}.{name}", "", default)


def no_op(name: str, kind: Kind, reason: str) -> Key:
    """Changes nothing here, whatever its value."""
    return Key(name, kind, "no-op", "", reason)


def left_out(name: str, kind: Kind, reason: str, default: Any = None) -> Key:
    """Cannot be honoured; the training is the same without it, only slower or larger."""
    return Key(name, kind, "left out", "", reason, default)


def refused(name: str, kind: Kind, reason: str, default: Any = None) -> Key:
    """Cannot be honoured, and the training would be another without it: the import stops."""
    return Key(name, kind, "refused", "", reason, default)


def section(name: str) -> Key:
    """Holds keys."""
    return Key(name, "section", "honoured")


def by_name(rows: Iterable[Key]) -> dict[str, Key]:
    """The rows of a table by their names, each of which stands there once."""
    table: dict[str, Key] = {}
    for row in rows:
        assert row.name not in table, row.name
        table[row.name] = row
    return table


def unknown_key(where: str, name: str, known: Sequence[str]) -> PipelineError:
    """The error for a key that no table has, with the nearest that one has."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if not near:
        tails = {path.rpartition(".")[2]: path for path in known}
        tail = difflib.get_close_matches(name.rpartition(".")[2], list(tails), n=3, cutoff=0.5)
        near = [tails[found] for found in tail]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return PipelineError(
        f"{where}: unknown key {name}",
        hint=f"{hint}correct it or take it out; docs/importing.md lists all that are known",
    )
