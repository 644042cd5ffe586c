"""The tables of docs/importing.md, from the table of keys."""

from __future__ import annotations

from collections.abc import Mapping

from zerotrain.cli.docs.tables import replace_generated, table
from zerotrain.importers.keys import DIFFSYNTH, DIFFUSERS, SIMPLETUNER, TRAINER
from zerotrain.launch.keys import (
    ACCELERATE,
    DEEPSPEED,
    DEEPSPEED_LAUNCHER_FLAGS,
    LAUNCH_FLAGS,
    TORCHRUN_FLAGS,
    Key,
)

TABLES: dict[str, tuple[str, Mapping[str, Key]]] = {
    "accelerate's YAML": ("Key", ACCELERATE),
    "DeepSpeed's JSON": ("Key", DEEPSPEED),
    "Flags of `accelerate launch`": ("Flag in addition to the YAML's keys", LAUNCH_FLAGS),
    "Flags of `torchrun`": ("Flag", TORCHRUN_FLAGS),
    "Flags of `deepspeed`": ("Flag", DEEPSPEED_LAUNCHER_FLAGS),
    "DiffSynth-Studio's flags": ("Flag", DIFFSYNTH),
    "Flags of diffusers' example scripts": ("Flag", DIFFUSERS),
    "HF Trainer's and openMind's flags": ("Flag", TRAINER),
    "SimpleTuner's config.json": ("Key", SIMPLETUNER),
}


def document(page: str) -> str:
    """Return the page with its tables written again."""
    tables = [
        f"### {title}\n\n" + table((first, "What becomes of it", ""), rows)
        for title, (first, keys) in TABLES.items()
        if (rows := [_row(key) for key in keys.values() if key.type != "section"])
    ]
    return replace_generated(page, "tables", "\n" + "\n".join(tables) + "\n")


def _row(key: Key) -> tuple[str, str, str]:
    reason = key.reason
    if key.fate == "mapped":
        became = "honoured by " + ", ".join(f"`{ours}`" for ours in key.ours.split(", "))
    elif key.fate == "passed_through":
        became, reason = f"honoured by `{key.ours}`", "as it is"
    elif key.fate == "ignored_no_effect":
        became = "no-op"
    else:
        became = "left out" if key.fate == "dropped" else key.fate
        if key.default is not None:
            became += f", unless `{_plain(key.default)}`"
    return f"`{key.name}`", became, reason


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
