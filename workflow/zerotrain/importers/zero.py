"""ZeRO stage and offload: the nearest preset, and its overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.launch.keys import ZERO
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.launch.zero import zero_optimization
from zerotrain.models.sizes import model_sizes

PRESETS = Path("config/launch")
SHIPPED = Path(__file__).parents[3] / PRESETS
"""Presets of the installation, for imports outside a project."""
BY_STAGE = {
    0: ("torch",),
    1: ("zero1",),
    2: ("zero2", "zero2_offload"),
    3: ("zero3", "zero3_offload", "zero3_nvme"),
}
"""Preset files by ZeRO stage, the simplest first."""

DEVICES = ("none", "cpu", "nvme")
TARGETS = ("offload_optimizer", "offload_param")
STAGE = ZERO + "stage"
ANY_MODEL = model_sizes({"": [1]})


def read_zero(
    flat: dict[str, Any], result: ImportedConfig, presets: Path, path: str | None
) -> Preset:
    """Set `launch.preset` by stage and offload.

    Args:
        flat: The file's keys.
        result: Receives preset, offload_optimizer, offload_param and offload_path.
        presets: Folder of the preset files.
        path: Folder for NVMe offload, if the file names none.

    Raises:
        PipelineError: there is no such stage or device, or NVMe without a folder.
    """
    stage = flat.get(STAGE, 0)
    if stage == AUTO:
        stage = 2  # accelerate's default
    if stage not in BY_STAGE:
        raise PipelineError(f"{STAGE} is {stage!r}", hint="there are stages 0, 1, 2 and 3")
    devices = {target: _device(flat, result, target, stage) for target in TARGETS}
    presets = presets if presets.is_dir() else SHIPPED
    candidates = [read_preset(presets / f"{name}.yaml") for name in BY_STAGE[stage]]
    preset = min(candidates, key=lambda preset: _distance(preset, devices))
    _note_stage(flat, result, stage, preset)
    for target, device in devices.items():
        key, ours = f"{ZERO}{target}.device", f"launch.{target}"
        shown = flat.get(key)
        if device == getattr(preset, target):
            if shown is not None and shown == device:
                result.note("kept", key, shown, f"preset {preset.name}", ours)
            elif shown == AUTO:
                result.note("resolved", key, shown, "nothing is offloaded unless asked for", ours)
        else:
            result.keep(key, device, ours)
    _note_path(flat, result, devices, path)
    return preset


def _device(flat: dict[str, Any], result: ImportedConfig, target: str, stage: int) -> str:
    """Return the offload device of the target that the stage allows."""
    key = f"{ZERO}{target}.device"
    old = ZERO + {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[target]
    if old in flat:
        given = flat.pop(old)
        if given is True:
            flat.setdefault(key, "cpu")
            result.note("changed", old, given, f"the old form of {target}: cpu", f"launch.{target}")
        else:
            result.ignore(old, given, "nothing is offloaded by it")
    device = str(flat.get(key, "none")).casefold()
    device = "none" if device == AUTO else device
    if device not in DEVICES:
        raise PipelineError(f"{key} is {device!r}", hint=f"one of {', '.join(DEVICES)}")
    if device == "none":
        return device
    if stage == 0 or (target == "offload_param" and stage < 3):
        what = "parameters stay whole below stage 3" if stage else "nothing is sharded at stage 0"
        result.drop(key, flat.pop(key), f"{what}, so there is nothing to offload")
        return "none"
    if device == "nvme" and stage < 3:
        result.note("changed", key, flat.pop(key), "DeepSpeed swaps to NVMe at stage 3 only: cpu")
        return "cpu"
    return device


def _distance(preset: Preset, devices: dict[str, str]) -> int:
    return sum(getattr(preset, target) != device for target, device in devices.items())


def _note_stage(flat: dict[str, Any], result: ImportedConfig, stage: int, preset: Preset) -> None:
    given = flat.get(STAGE)
    reason = "the nearest preset by stage and offload"
    if stage == 0:
        reason = "stage 0 shards nothing: plain PyTorch does the same"
    if given is None:
        result.assume("launch.preset", preset.name, reason)
    elif given == AUTO:
        result.resolve(STAGE, "launch.preset", preset.name, "accelerate's default is stage 2")
    else:
        result.put("kept", STAGE, given, "launch.preset", preset.name, reason)


def _note_path(
    flat: dict[str, Any], result: ImportedConfig, devices: dict[str, str], path: str | None
) -> None:
    """Set one folder for both targets."""
    for target in TARGETS:
        key = f"{ZERO}{target}.nvme_path"
        given = flat.get(key)
        if devices[target] != "nvme":
            if given is not None:
                result.ignore(key, given, "nothing of it goes to NVMe")
            continue
        if given in (None, AUTO, "none"):
            if path is None:
                raise PipelineError(
                    f"{key} is missing, and {target} is nvme",
                    hint="name a folder on a fast disk there",
                )
            continue
        if result.values.get("launch.offload_path", given) != given:
            result.note("changed", key, given, "one folder holds what both targets swap")
        else:
            result.keep(key, given, "launch.offload_path")
    if "nvme" in devices.values() and "launch.offload_path" not in result.values:
        result.keep("offload_param_path", path, "launch.offload_path")
    elif path is not None and "launch.offload_path" not in result.values:
        result.ignore("offload_param_path", path, "nothing goes to NVMe")


def stands_anyway(preset: Preset, name: str) -> tuple[bool, Any]:
    """Return whether the preset sets this key for every model, and its value."""
    written = zero_optimization(
        preset.zero_stage, preset.offload_optimizer, preset.offload_param, None, 1, ANY_MODEL
    )
    value, source, _ = written.get(name.removeprefix(ZERO), (None, "", ""))
    return source == "default", value
