"""Launch presets: small readable files in config/launch, one per kind of launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from zerotrain.artifact.documents import check_object, read_yaml
from zerotrain.config.launch import LaunchConfig
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError

KEYS = {"engine", "zero_stage", "offload_optimizer", "offload_param", "choose"}
DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Preset:
    """Content of a preset file."""

    name: str
    engine: Literal["torch", "deepspeed", "auto"]
    zero_stage: int = 0
    """1 to 3; 0 without DeepSpeed."""
    offload_optimizer: str = "none"
    """Location of the optimizer: none (on the device), cpu or nvme."""
    offload_param: str = "none"
    """Location of parameters that are not in use: none (on the device), cpu or nvme."""
    choose: tuple[str, ...] = ()
    """For `engine: auto`: the presets to choose from, the lowest first."""


def read_preset(path: Path) -> Preset:
    """Read a preset file; its name is the file name.

    Raises:
        PipelineError: the file is missing or not YAML, or has an unknown engine or key, or
            contradictory values.
    """
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.yaml"))
        raise PipelineError(
            f"{path}: no such launch preset",
            hint=known_names(path.stem, known, f"presets in {path.parent}"),
        )
    hint = (
        "a preset holds `engine: torch`; `engine: deepspeed` with zero_stage (1, 2, 3), "
        "offload_optimizer and offload_param (none, cpu, nvme); or `engine: auto` with choose"
    )
    document = check_object(read_yaml(path, follow_links=True, hint=hint), path, hint=hint)
    if unknown := sorted(set(document) - KEYS):
        raise PipelineError(f"{path}: unknown keys {', '.join(unknown)}", hint=hint)
    if wrong := _list_invalid(document):
        key = wrong[0]
        raise PipelineError(
            f"{path}: engine {document.get('engine')!r} with {key} {document.get(key)!r}", hint=hint
        )
    choose = tuple(document.pop("choose", ()))
    preset = Preset(path.stem, choose=choose, **document)
    check_offload(preset, str(path))
    return preset


def with_own_offload(preset: Preset, launch: LaunchConfig, where: str) -> Preset:
    """Return the preset with the launch's own offload settings.

    Raises:
        PipelineError: the preset's stage does not support them.
    """
    own = {
        key: value
        for key in ("offload_optimizer", "offload_param")
        if (value := getattr(launch, key)) is not None
    }
    changed = replace(preset, **own)
    check_offload(changed, where)
    return changed


def check_offload(preset: Preset, where: str) -> None:
    """Refuse offload without its stage, which DeepSpeed would silently ignore or crash on.

    Raises:
        PipelineError: the message names target, device and stage.
    """
    stage = preset.zero_stage
    launch = "plain PyTorch" if stage == 0 else f"ZeRO stage {stage}"
    for target, device, lowest in (
        (
            "offload_optimizer",
            preset.offload_optimizer,
            3 if preset.offload_optimizer == "nvme" else 1,
        ),
        ("offload_param", preset.offload_param, 3),
    ):
        if device != "none" and stage < lowest:
            raise PipelineError(
                f"{where}: {target} is {device} under {launch}, which cannot do that: it needs "
                f"ZeRO stage {lowest}" + (" or higher" if lowest < 3 else ""),
                hint=f"set {target} to none, or choose a preset of stage {lowest}",
            )


def _list_invalid(document: dict[str, object]) -> list[str]:
    """Return the keys whose values are invalid for the engine."""
    engine = document.get("engine")
    if engine not in ("torch", "deepspeed", "auto"):
        return ["engine"]
    wrong = []
    stages = (1, 2, 3) if engine == "deepspeed" else (None,)
    if document.get("zero_stage") not in stages:
        wrong.append("zero_stage")
    for target in ("offload_optimizer", "offload_param"):
        if target in document and (engine != "deepspeed" or document[target] not in DEVICES):
            wrong.append(target)
    choose = document.get("choose")
    named = isinstance(choose, list) and choose and all(isinstance(n, str) for n in choose)
    if bool(named) != (engine == "auto") or (choose is not None and not named):
        wrong.append("choose")
    return wrong
