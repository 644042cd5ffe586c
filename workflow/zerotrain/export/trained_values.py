"""The values a rolling checkpoint was trained with, which no edit of the configuration changes.

They are in its manifest; the length of prompts is in the manifest of its cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import leaves
from zerotrain.training.checkpointing.conditions import RecordedConditions, read_conditions

if TYPE_CHECKING:
    from zerotrain.export.target import WeightsTarget

CACHES = "data/*/cache/*"
"""Caches, relative to results/."""
LENGTH = "max_sequence_length"
KEYS = ("lora", "peft", "frozen_parameters", "trainable_parameters")


def trained_values(checkpoint: Path) -> dict[str, Any] | None:
    """Return the fields of a WeightsTarget that the training of a rolling checkpoint decides.

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
