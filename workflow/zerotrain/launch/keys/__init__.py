"""Tables of keys: the treatment of each key and flag of the programs from which users import.

Rows are in the TOML files next to this module and in importers/keys. Every reader looks keys up
there, docs/importing.md is generated from them, and tests compare them with the programs' own
classes. A key without a row is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zerotrain.config.suggestions import nearest
from zerotrain.errors import PipelineError

Type = Literal["integer", "number", "boolean", "string", "list", "section", "block"]
"""The keys of a section have their own rows; a block is accepted or refused as a whole."""

Fate = Literal["mapped", "passed_through", "ignored_no_effect", "dropped", "refused"]
"""mapped: one of our keys has the same effect. passed_through: it goes into the launch file
unchanged, if it differs from the value there. ignored_no_effect: it changes nothing here, whatever
its value. dropped: the training is the same without it, only slower or larger. refused: the
training would be different without it, so the import stops."""


@dataclass(frozen=True)
class Key:
    """Row of a table."""

    name: str
    """Path in the file, sections joined by dots; a flag has no dashes."""
    type: Type
    fate: Fate = "mapped"
    ours: str = ""
    """Our key with the same effect."""
    default: Any = None
    """The program's value if the key is absent; None if it varies."""
    reason: str = ""
    to: str = ""
    """The name of the transform of its value (zerotrain.importers.key_values), or what is noted
    instead: no_effect, nothing (it asks for nothing more), differs. Empty: it is taken as it is."""
    with_: str = ""
    """Column `with`: the key without which it means nothing, `KEY` or `KEY = VALUE`."""
    otherwise: str = ""
    """What the report says where that key is missing."""
    says: str = ""
    """What the report says where the value is taken."""
    changed: str = ""
    """What the report says instead, if the value has another effect here."""
    assumed: str = ""
    """What the report says where the default is written, as the key is absent."""


Table = dict[str, Key]
"""Rows by key name."""


def read_tables(file: Path) -> dict[str, Table]:
    """Read the tables of a TOML file, by name."""
    return {
        title: {
            name: Key(
                name, **{"with_" if column == "with" else column: v for column, v in row.items()}
            )
            for name, row in rows.items()
        }
        for title, rows in tomllib.loads(file.read_text(encoding="utf-8")).items()
    }


_LAUNCHERS = read_tables(Path(__file__).with_name("accelerate.toml"))
ACCELERATE = _LAUNCHERS["accelerate"]
LAUNCH_FLAGS = _LAUNCHERS["accelerate_launch"]
TORCHRUN_FLAGS = _LAUNCHERS["torchrun"]
DEEPSPEED_LAUNCHER_FLAGS = _LAUNCHERS["deepspeed_launcher"]
DEEPSPEED_FLAGS = {
    name.partition(".")[2]: name for name in ACCELERATE if name.startswith("deepspeed_config.")
}
"""Flags of `accelerate launch` that are in deepspeed_config in its YAML."""

DEEPSPEED = read_tables(Path(__file__).with_name("deepspeed.toml"))["deepspeed"]
DEEPSPEED_ALIASES = {"bfloat16": "bf16"}
"""Old names of sections."""
ZERO = "zero_optimization."


def near_keys(name: str, known: Sequence[str]) -> list[str]:
    """Return the known keys that a mistyped one may mean: by its path, else by its last part."""
    if near := nearest(name, known, most=3, cutoff=0.5, margin=0.15):
        return near
    tails = {path.rpartition(".")[2]: path for path in known}
    ends = nearest(name.rpartition(".")[2], tails, most=3, cutoff=0.5, margin=0.15)
    return [tails[end] for end in ends]


def unknown_key(where: str, name: str, known: Sequence[str]) -> PipelineError:
    """Return the error for a key without a row in any table, with the nearest known keys."""
    near = near_keys(name, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return PipelineError(
        f"{where}: unknown key {name}",
        hint=f"{hint}correct it or take it out (`--skip {name}`); docs/importing.md lists all "
        "that are known",
    )
