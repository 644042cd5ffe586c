"""The origin of exported weights: their base, their phase, and the values that it trained with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import leaves
from zerotrain.models.hub import HUB_ID
from zerotrain.training.checkpointing.conditions import RecordedConditions, read_conditions

if TYPE_CHECKING:
    from zerotrain.export.target import WeightsTarget


@dataclass(frozen=True)
class Origin:
    """The origin of weights, from the folders that they came from, as far as these still exist."""

    base: str | None = None
    """Hub id or folder of the base model, as in the configuration."""
    commit: str | None = None
    """The base's commit on the hub."""
    base_folder: Path | None = None
    """Folder of the base."""
    phase: Path | None = None
    """The phase's folder, with metrics.json, evaluation/ and launch/."""

    @property
    def hub_id(self) -> str | None:
        """The base's id, if it is a model of the hub."""
        on_hub = self.base and HUB_ID.fullmatch(self.base) and not Path(self.base).exists()
        return self.base if on_hub else None


def find_origin(weights: Artifact) -> Origin:
    """Follow an exported folder to the phase and the base that it came from."""
    while "weights" in weights.parents:
        above = find_parent(weights, "weights")
        if above is None:
            return Origin()
        weights = above
    base, checkpoint = find_parent(weights, "base"), weights.parents.get("checkpoint")
    phase = Path(checkpoint["path"]).parent if checkpoint else None
    return Origin(
        base=str(base.content["base"]) if base and "base" in base.content else None,
        commit=base.content.get("commit") if base else None,
        base_folder=base.folder if base else None,
        phase=phase if phase and (phase / "metrics.json").is_file() else None,
    )


def find_parent(made: Artifact, name: str) -> Artifact | None:
    """Return a parent if it is still in its place and unchanged; otherwise None."""
    recorded = made.parents.get(name)
    if recorded is None:
        return None
    try:
        parent = artifact.read_manifest(Path(recorded["path"]), name)
    except PipelineError:
        return None
    return parent if parent.identity == recorded["identity"] else None


CACHES = "data/*/cache/*"
"""Caches, relative to results/."""
LENGTH = "max_sequence_length"
KEYS = ("lora", "peft", "frozen_parameters", "trainable_parameters")


def trained_values(checkpoint: Path) -> dict[str, Any] | None:
    """Return the fields of a WeightsTarget that the training of a rolling checkpoint decides.

    No edit of the configuration changes them: they are in its manifest, and the length of prompts
    in the manifest of its cache.

    Args:
        checkpoint: A folder; of results/RUN/PHASE/progress, if it is a rolling checkpoint.

    Returns:
        lora, peft, frozen_parameters, trainable_parameters and long_captions; and
        max_sequence_length if the cache still exists. None for another folder.
    """
    recorded = _read_recorded(checkpoint)
    if recorded is None:
        return None
    trains = recorded.trains
    values = {key: trains[key] for key in KEYS}
    values["long_captions"] = trains.get("long_captions", "truncate")
    made_by = _made_by(checkpoint.absolute().parents[3], recorded.ran_on.get("cache"))
    return values | ({LENGTH: made_by[LENGTH]} if LENGTH in made_by else {})


def _read_recorded(checkpoint: Path) -> RecordedConditions | None:
    rolling = checkpoint.absolute().parent.name.startswith("progress")
    return read_conditions(checkpoint) if rolling and artifact.is_published(checkpoint) else None


def list_changes_since(trained: Mapping[str, Any], weights: WeightsTarget) -> Iterator[str]:
    """List the values of a configuration that the training did not have."""
    now = dict(leaves({key: getattr(weights, key) for key in trained}))
    then = dict(leaves(trained))
    for key in sorted(now.keys() | then.keys()):
        one, other = now.get(key), then.get(key)
        if json.dumps(one) != json.dumps(other):
            yield f"{key} is {one}, and the checkpoint was trained with {other}, which is taken"


def _made_by(results: Path, cache: str | None) -> Mapping[str, Any]:
    """Return how a cache was made, from its manifest; nothing if the cache is gone."""
    for folder in results.glob(CACHES) if cache else ():
        try:
            manifest = artifact.read_manifest(folder, "cache")
        except PipelineError:
            continue
        if manifest.identity == cache:
            return manifest.made_by
    return {}
