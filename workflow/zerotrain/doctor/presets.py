"""Whether each launch preset can run on a machine, and if not, why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerotrain.compiled_ops import SWAP_OP
from zerotrain.errors import PipelineError
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.machine.detect import Machine
from zerotrain.machine.verdict import usable_engines, usable_precisions


def verdicts(
    folder: Path, machine: Machine, ops: dict[str, Any], loads: dict[str, str]
) -> dict[str, str]:
    """A sentence for each preset file of a folder.

    Args:
        folder: Folder of the presets.
        machine: The machine.
        ops: What zerotrain.doctor.installation.ops found.
        loads: Why torch and deepspeed cannot be imported, by name; empty where they can.
    """
    said = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            preset = read_preset(path)
        except PipelineError as error:
            said[path.stem] = f"no: {error.what}"
        else:
            said[path.stem] = _verdict(preset, machine, ops, loads)
    return said


def _verdict(preset: Preset, machine: Machine, ops: dict[str, Any], loads: dict[str, str]) -> str:
    if preset.engine == "auto":
        return "yes: the planner chooses one of the others; `zerotrain plan` shows which"
    if why := _refusal(preset, machine, ops, loads):
        return f"no: {why}"
    swaps_weights = preset.offload_param == "nvme"
    usable = usable_precisions(machine, preset.engine, swaps_weights=swaps_weights)
    said = f"yes, with mixed_precision {', '.join(name for name in usable if not usable[name])}"
    wanted = {SWAP_OP} if _swaps(preset) else set()
    if preset.engine == "deepspeed":
        wanted |= ops["built"].keys() - {SWAP_OP}
    waiting = sorted(op for op in wanted if not ops["built"].get(op))
    return said + (f"; {' and '.join(waiting)} will be built first" if waiting else "")


def _refusal(preset: Preset, machine: Machine, ops: dict[str, Any], loads: dict[str, str]) -> str:
    """Why not; empty where nothing is in the way."""
    if loads["torch"]:
        return loads["torch"]
    if preset.engine == "torch":
        return ""
    built = ops["built"]
    if why := usable_engines(machine)["deepspeed"] or loads["deepspeed"]:
        return why
    if not ops["compiler"] and not all(built[op] for op in built if op != SWAP_OP):
        return "its compiled ops are not built, and there is no C++ compiler"
    if _swaps(preset) and not built.get(SWAP_OP) and not ops["libaio_headers"]:
        return "libaio's headers are missing (`apt-get install libaio-dev`)"
    return ""


def _swaps(preset: Preset) -> bool:
    return "nvme" in (preset.offload_optimizer, preset.offload_param)
