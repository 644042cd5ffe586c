"""What a phase trains, and what it runs on: the two kinds of facts that a checkpoint records.

*What it trains* is set by the user: the configuration's values, their defaults and what follows
from them, the data, the base and the starting state. It is in the manifest of each checkpoint, as
content["trains"]. *What it runs on* is the rest that a number's last bits may depend on:
versions, device, threads, and the values that only affect rounding. It is in checkpoint.json and
state.json, as "ran_on".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import check_object, parse_json, read_object
from zerotrain.artifact.recipe import Difference, setting_differences
from zerotrain.config.section import Role
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import DEFAULTS, ResolvedPhase, keys_of

TRAINS = "trains"
TRAINS_SHA256 = "trains_sha256"
"""Key in a checkpoint's manifest, which nothing else protects."""
THREADS = "threads"
ROUNDING_KEYS = sorted(keys_of(Role.ROUNDING))
SETTINGS = {*ROUNDING_KEYS, "cache"}
"""Keys of ran_on that the configuration sets, as it sets DeepSpeed's: a phase may have other values
than the one before it."""


@dataclass(frozen=True)
class RecordedConditions:
    """What a checkpoint records of its making."""

    trains: dict[str, Any]
    ran_on: dict[str, Any]


def describe_training(phase: ResolvedPhase, parents: Mapping[str, Artifact]) -> dict[str, Any]:
    """Describe what a phase trains, regardless of its name and its end.

    Args:
        phase: The resolved phase.
        parents: The published folders `base`, `cache` and, if there is one, `start`.

    Returns:
        JSON values by key: those of ResolvedPhase.numbers, and digests of base, data and start.
    """
    values = {
        **phase.numbers(),
        "base": artifact.digest(parents["base"].content["parts"]),
        "data": data_digest(parents["cache"]),
        "start": parents["start"].identity if "start" in parents else None,
    }
    return check_object(parse_json(json.dumps(values), TRAINS), TRAINS)


def data_digest(cache: Artifact) -> str:
    """Return a digest of what is drawn from a cache, regardless of the code that encoded it.

    For images it covers the pixels, captions, crops and sizes of the train split, and the user's
    settings of their encoding; for text the dataset.
    """
    from zerotrain.cache.layout import DATA_SHA256, INDEX  # pyarrow, which checks do without

    index = read_object(cache.path(INDEX)) if INDEX in cache.files else {}
    if DATA_SHA256 in index:
        return str(index[DATA_SHA256])
    dataset = cache.parents.get("dataset", {}).get("identity", cache.identity)
    return artifact.digest({"dataset": dataset})


def manifest_content(trains: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint's manifest: what it trains, with its digest."""
    return {TRAINS: trains, TRAINS_SHA256: artifact.digest(trains)}


def check_content(manifest: Artifact) -> None:
    """Check what a checkpoint's manifest says that it trains.

    Raises:
        PipelineError: it is damaged.
    """
    recorded = manifest.content.get(TRAINS)
    if not isinstance(recorded, dict):
        trouble = f"{TRAINS} is no object"
    elif manifest.content.get(TRAINS_SHA256) != artifact.digest(recorded):
        trouble = f"{TRAINS} does not have the sha256 that {TRAINS_SHA256} says"
    else:
        return
    raise PipelineError(
        f"{manifest.folder}: manifest.json: {trouble}", hint="restore the file from a copy"
    )


def read_conditions(checkpoint: Path) -> RecordedConditions:
    """Read what a rolling or published checkpoint was trained with.

    Raises:
        PipelineError: its manifest or its checkpoint.json is damaged.
    """
    manifest = artifact.read_manifest(checkpoint, "checkpoint")
    check_content(manifest)
    ran_on = read_object(manifest.path("checkpoint.json")).get("ran_on")
    return RecordedConditions(manifest.content[TRAINS], ran_on if isinstance(ran_on, dict) else {})


def read_if_whole(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; return None if the file is missing or damaged."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return None


def changes(recorded: RecordedConditions, present: Mapping[str, Any]) -> list[Difference]:
    """List the differences between what a checkpoint and a phase train, by dotted key.

    A key that one side lacks has its default there, if it has one.

    Args:
        recorded: What the checkpoint records.
        present: What `describe_training` returns now.
    """
    old, new = dict(recorded.trains), dict(present)
    for key in old.keys() ^ new.keys():
        if key in LEFT_OUT:
            old.setdefault(key, LEFT_OUT[key])
            new.setdefault(key, LEFT_OUT[key])
    return _differences(old, new)


def environment_changes(
    recorded: Mapping[str, Any], present: Mapping[str, Any], *, same_phase: bool = True
) -> list[Difference]:
    """List the differences between what earlier steps ran on and present ones would, by key.

    Args:
        recorded: ran_on of a checkpoint or a state. If it is empty, nothing is known of it.
        present: ran_on now.
        same_phase: Whether both are of one phase; else the phase's settings are not compared.
    """
    found = _differences(dict(recorded), dict(present)) if recorded else []
    if same_phase:
        return found
    return [
        one for one in found if one.key not in SETTINGS and not one.key.startswith("deepspeed.")
    ]


def history_entries(step: int, changed: Iterable[Difference]) -> list[dict[str, Any]]:
    """Return the entries of a position's history for what changed after a step."""
    return [{"step": step, "key": one.key, "old": one.old, "new": one.new} for one in changed]


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """List what differs, sorted by key. A history is JSON, where a missing value is null."""
    return sorted(setting_differences(old, new, missing=None), key=attrgetter("key"))


LEFT_OUT: dict[str, Any] = {
    **{key: value for key, value in DEFAULTS.items() if key != "lr_warmup_steps"},
    **dict.fromkeys(keys_of(Role.IMAGES) | keys_of(Role.TEXT)),
    "overrides": {},
}
"""Values of keys that `trains` omits. A warm-up is omitted if it is a share of the schedule."""
