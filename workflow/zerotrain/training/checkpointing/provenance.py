"""What a training process records in its checkpoints about how they were made."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact, write_json
from zerotrain.artifact.recipe import Difference
from zerotrain.artifact.source_commit import source_commit
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.device import device_software, software
from zerotrain.state.position import TrainerState, read_position
from zerotrain.training.checkpointing import conditions

MADE_BY = "made_by.json"
"""File among the records of a checkpoint: {"commit", "version"}."""
RECORDED = "recorded"
"""Key of the history entry for the step from which on `ran_on` is known."""


@dataclass(frozen=True)
class Provenance:
    """What the steps of this process train, and what they run on."""

    trains: dict[str, Any] = field(default_factory=dict)
    ran_on: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    changed: list[Difference] = field(default_factory=list)
    """What differs from the steps before."""

    @cached_property
    def _commit(self) -> str | None:
        return source_commit()

    def write_records(self, records: Path) -> None:
        """Write which source made a checkpoint; it is not part of the checkpoint's identity."""
        records.mkdir(exist_ok=True)
        source = {"commit": self._commit, "version": self.ran_on.get("version")}
        write_json(records / MADE_BY, source)


def ran_on(
    phase: ResolvedPhase, cache: Artifact, model: torch.nn.Module, device: torch.device
) -> dict[str, Any]:
    """Describe what the last bits of a step's numbers depend on.

    Args:
        phase: The resolved phase.
        cache: The cache that is drawn from.
        model: The model in training.
        device: The device it is trained on.

    Returns:
        JSON scalars by key: version, cache, threads, device, driver, versions.*, env.*, the values
        of ResolvedPhase.rounding, and attention if the model names its implementation.
    """
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    return {
        "version": VERSIONS["train_phase"],
        "cache": cache.identity,
        conditions.THREADS: torch.get_num_threads(),
        **software(),
        **device_software(device),
        **phase.rounding(),
        **({"attention": attention} if attention else {}),
    }


def describe_provenance(
    phase: ResolvedPhase,
    model: torch.nn.Module,
    device: torch.device,
    *,
    base: Path,
    cache: Path,
    start: Path | None,
    resume: Path | None,
) -> Provenance:
    """Describe what this process trains and runs on, and what differs from the steps before.

    Args:
        phase: The resolved phase.
        model: The model in training.
        device: The device it is trained on.
        base: Folder of the base model.
        cache: Folder of the cache.
        start: Folder of the state that the phase starts from, if any.
        resume: Checkpoint of this phase to resume, if any.
    """
    parents = {
        "base": artifact.read_manifest(base, "base"),
        "cache": artifact.read_manifest(cache, "cache"),
    }
    if start is not None:
        parents["start"] = artifact.read_manifest(start, "state")
    trains = conditions.describe_training(phase, parents)
    now = ran_on(phase, parents["cache"], model, device)
    if resume is not None:
        return _describe_resumed(trains, now, resume)
    if start is not None:
        position = read_position(parents["start"], "state.json")
        changed = conditions.environment_changes(position.ran_on, now, same_phase=False)
        return Provenance(trains, now, continue_history(position, changed), changed)
    return Provenance(trains, now)


def _describe_resumed(trains: dict[str, Any], now: dict[str, Any], resume: Path) -> Provenance:
    manifest = artifact.read_manifest(resume, "checkpoint")
    position = read_position(manifest, "checkpoint.json")
    recorded = conditions.read_conditions(resume)
    changed = conditions.changes(recorded, trains)
    changed += conditions.environment_changes(recorded.ran_on, now)
    return Provenance(trains, now, continue_history(position, changed), changed)


def continue_history(position: TrainerState, changed: list[Difference]) -> list[dict[str, Any]]:
    """Return the history of steps that follow a position.

    Args:
        position: The position they start from.
        changed: How what they train or run on differs from the steps before.

    Returns:
        The entries so far, those for what changed, and one if nothing was recorded of the steps
        before: another program made them.
    """
    unknown = position.step and not position.ran_on
    begin = [Difference("settings", RECORDED, None, "from here")] if unknown else []
    return position.history + conditions.history_entries(position.step, [*begin, *changed])
