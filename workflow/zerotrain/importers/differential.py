"""DiffSynth-Studio's differential training: a LoRA on a base that another LoRA is fused into.

Its script has two trainings; the second loads the result of the first by --preset_lora_path. Here
they are two runs, and the base of the second is the merged weights of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from zerotrain.importers.command import Command
from zerotrain.importers.diffsynth import PREPARE
from zerotrain.importers.imported_config import ImportedConfig, Note
from zerotrain.importers.keys import DIFFSYNTH

PRESET = ("preset_lora_path", "preset_lora_model")


def split_trainings(commands: Sequence[Command]) -> tuple[list[Command], list[Command]] | None:
    """Split a script of two trainings, the second without the flags of its preset LoRA.

    Returns:
        The commands of each; None if it is not such a script, or if the second does not load the
        last weights of the first into the model that both train.
    """
    ends = [i for i, one in enumerate(commands) if one.arguments.get("task") != PREPARE]
    if len(ends) != 2:
        return None
    first, second = (commands[i].arguments for i in ends)
    last_epoch = int(first.get("num_epochs", DIFFSYNTH["num_epochs"].default)) - 1
    file = PurePosixPath(first.get("output_path", "")) / f"epoch-{last_epoch}.safetensors"
    preset = second.get(PRESET[0])
    if preset is None or PurePosixPath(preset) != file:
        return None
    if not second.get(PRESET[1]) == first.get("lora_base_model") == second.get("lora_base_model"):
        return None
    own = {name: value for name, value in second.items() if name not in PRESET}
    after = [*commands[ends[0] + 1 : ends[1]], replace(commands[ends[1]], arguments=own)]
    return list(commands[: ends[0] + 1]), [*after, *commands[ends[1] + 1 :]]


def join_trainings(first: ImportedConfig, second: ImportedConfig, preset: str) -> ImportedConfig:
    """Let the second training start from the merged weights of the first."""
    run, base = first.values["run"], f"merged/{first.values['run']}"
    weights = f"results/{run}/{first.nested()['phases'][0]['name']}/weights"
    reason = (
        f"the base with the LoRA of the run {run}; make it when that has been trained: `zerotrain "
        f"export {weights} --to merged --dtype bf16 --output {base}`"
    )
    notes = [note for note in second.notes if note.ours != "base"]
    return replace(
        second,
        values={**second.values, "base": base},
        notes=[*notes, Note(PRESET[0], preset, "changed", "base", base, reason)],
        before=first,
    )
