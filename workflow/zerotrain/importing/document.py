"""The tables of docs/importing.md, from the table of keys."""

from __future__ import annotations

from collections.abc import Mapping

from zerotrain.importing.keys import Key
from zerotrain.importing.keys_accelerate import ACCELERATE, LAUNCH_FLAGS, TORCHRUN_FLAGS
from zerotrain.importing.keys_deepspeed import DEEPSPEED
from zerotrain.importing.keys_diffusers import DIFFUSERS
from zerotrain.importing.keys_programs import DIFFSYNTH, SIMPLETUNER, TRAINER

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
TABLES: dict[str, tuple[str, Mapping[str, Key]]] = {
    "accelerate's YAML": ("Key", ACCELERATE),
    "DeepSpeed's JSON": ("Key", DEEPSPEED),
    "Flags of `accelerate launch`": ("Flag beside the YAML's keys", LAUNCH_FLAGS),
    "Flags of `torchrun`": ("Flag", TORCHRUN_FLAGS),
    "DiffSynth-Studio's flags": ("Flag", DIFFSYNTH),
    "Flags of diffusers' example scripts": ("Flag", DIFFUSERS),
    "HF Trainer's and openMind's flags": ("Flag", TRAINER),
    "SimpleTuner's config.json": ("Key", SIMPLETUNER),
}


def document(page: str) -> str:
    """The page with its tables written again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = [
        "\n".join(
            [f"### {title}", "", f"| {first} | What becomes of it | |", "|---|---|---|", *rows]
        )
        for title, (first, table) in TABLES.items()
        if (rows := [_row(key) for key in table.values() if key.kind != "section"])
    ]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(tables) + f"\n\n{END}{after}"


def _row(key: Key) -> str:
    reason = key.reason
    if key.fate == "honoured":
        became = "honoured by " + ", ".join(f"`{ours}`" for ours in key.ours.split(", "))
    elif key.fate == "passed on":
        became, reason = f"honoured by `{key.ours}`", "as it is"
    elif key.fate == "no-op":
        became = "no-op"
    else:
        became = key.fate
        if key.default is not None:
            became += f", unless `{_plain(key.default)}`"
    return f"| `{key.name}` | {became} | {reason} |"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
