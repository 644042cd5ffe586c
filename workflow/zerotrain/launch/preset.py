"""Launch presets: small readable files under config/launch, one per way of launching."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from zerotrain.config import LaunchConfig
from zerotrain.errors import PipelineError

KEYS = {"engine", "zero_stage", "offload_optimizer", "offload_param", "choose"}
DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Preset:
    """What a preset file says."""

    name: str
    engine: Literal["torch", "deepspeed", "auto"]
    zero_stage: int = 0
    """1 to 3; 0 without DeepSpeed."""
    offload_optimizer: str = "none"
    """Where the optimizer lives: none (on the device), cpu or nvme."""
    offload_param: str = "none"
    """Where parameters wait: none (on the device), cpu or nvme."""
    choose: tuple[str, ...] = ()
    """Of `engine: auto`: the presets to choose from, the lowest first."""


def read_preset(path: Path) -> Preset:
    """Read a preset file; its name is the file's.

    Raises:
        PipelineError: the file is missing or no YAML, holds an unknown engine or key, or values
            that do not fit together.
    """
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
        raise PipelineError(
            f"{path}: no such launch preset", hint=f"presets in {path.parent}: {known}"
        )
    hint = (
        "a preset holds `engine: torch`; `engine: deepspeed` with zero_stage (1, 2, 3), "
        "offload_optimizer and offload_param (none, cpu, nvme); or `engine: auto` with choose"
    )
    try:
        found = YAML(typ="safe").load(path.read_text())
    except YAMLError as error:
        text = " ".join(str(error).split())
        raise PipelineError(f"{path}: not valid YAML: {text}", hint=hint) from error
    if not isinstance(found, dict):
        raise PipelineError(f"{path}: holds {type(found).__name__}, not keys", hint=hint)
    if unknown := sorted(set(found) - KEYS):
        raise PipelineError(f"{path}: unknown keys {', '.join(unknown)}", hint=hint)
    if wrong := _wrong(found):
        key = wrong[0]
        raise PipelineError(
            f"{path}: engine {found.get('engine')!r} with {key} {found.get(key)!r}", hint=hint
        )
    choose = tuple(found.pop("choose", ()))
    preset = Preset(path.stem, choose=choose, **found)
    check_offload(preset, str(path))
    return preset


def with_own_offload(preset: Preset, launch: LaunchConfig, where: str) -> Preset:
    """The preset with a launch's own words on what is offloaded where.

    Raises:
        PipelineError: the preset's stage cannot do it.
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
    """Refuse what DeepSpeed would pass over in silence or die of: offload without its stage.

    Raises:
        PipelineError: naming target, device and stage.
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


def _wrong(found: dict[str, object]) -> list[str]:
    """The keys whose values the engine cannot have."""
    engine = found.get("engine")
    if engine not in ("torch", "deepspeed", "auto"):
        return ["engine"]
    wrong = []
    stages = (1, 2, 3) if engine == "deepspeed" else (None,)
    if found.get("zero_stage") not in stages:
        wrong.append("zero_stage")
    for target in ("offload_optimizer", "offload_param"):
        if target in found and (engine != "deepspeed" or found[target] not in DEVICES):
            wrong.append(target)
    choose = found.get("choose")
    named = isinstance(choose, list) and choose and all(isinstance(n, str) for n in choose)
    if bool(named) != (engine == "auto") or (choose is not None and not named):
        wrong.append("choose")
    return wrong
