"""Launch presets: small readable files under config/launch, one per way of launching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from zerotrain.errors import PipelineError


@dataclass(frozen=True)
class Preset:
    """What a preset file says."""

    name: str
    engine: Literal["torch", "deepspeed"]
    zero_optimization: dict[str, Any]
    """DeepSpeed's section of that name; empty for torch."""

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; 0 without DeepSpeed."""
        return int(self.zero_optimization.get("stage", 0))

    @property
    def offload_optimizer(self) -> str:
        """Where the optimizer lives: none (on the device), cpu or nvme."""
        return str(self.zero_optimization.get("offload_optimizer", {}).get("device", "none"))

    @property
    def offload_param(self) -> str:
        """Where parameters wait: none (on the device), cpu or nvme."""
        return str(self.zero_optimization.get("offload_param", {}).get("device", "none"))


def read_preset(path: Path) -> Preset:
    """Read a preset file; its name is the file's.

    Raises:
        PipelineError: the file is missing or no YAML, or holds an unknown engine or key, or "auto".
    """
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
        raise PipelineError(
            f"{path}: no such launch preset", hint=f"presets in {path.parent}: {known}"
        )
    hint = "a preset holds `engine: torch`, or `engine: deepspeed` and `zero_optimization`"
    try:
        found = YAML(typ="safe").load(path.read_text())
    except YAMLError as error:
        text = " ".join(str(error).split())
        raise PipelineError(f"{path}: not valid YAML: {text}", hint=hint) from error
    if not isinstance(found, dict):
        raise PipelineError(f"{path}: holds {type(found).__name__}, not keys", hint=hint)
    unknown = set(found) - {"engine", "zero_optimization"}
    engine, zero = found.get("engine"), found.get("zero_optimization", {})
    if unknown or engine not in ("torch", "deepspeed"):
        raise PipelineError(f"{path}: engine {engine!r}, unknown keys {sorted(unknown)}", hint=hint)
    if not isinstance(zero, dict) or bool(zero) != (engine == "deepspeed"):
        raise PipelineError(f"{path}: engine {engine}, zero_optimization {zero!r}", hint=hint)
    if keys := [key for key, value in _leaves(zero) if value == "auto"]:
        raise PipelineError(
            f"{path}: zero_optimization.{keys[0]} is 'auto'",
            hint="give a value: what is launched is written down before it starts",
        )
    if zero.get("round_robin_gradients"):
        raise PipelineError(
            f"{path}: round_robin_gradients is on",
            hint="turn it off: under it DeepSpeed names other parameters' moments, so that no "
            "checkpoint of two or more processes would be right",
        )
    return Preset(path.stem, engine, zero)


def _leaves(section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in _leaves(value))
        else:
            yield key, value
