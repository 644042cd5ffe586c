"""The folder of a published dataset, of images or text.

    manifest.json           counts, hashes of the other files, and what it was made by
    samples/samples.arrow   a row for each sample (artifact.columns), mapped and not loaded
    samples/bad.jsonl       a line for each refused sample, with the reason, if there are any

The identity is that of one JSON with all samples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, Artifact
from zerotrain.artifact.columns import Columns, read_columns
from zerotrain.artifact.documents import LeftOut, check_type, read_json_lines
from zerotrain.artifact.layout import rebuild_hint
from zerotrain.artifact.manifest import DATASET, IDENTITY
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.whole_file import sync
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import check_no_file
from zerotrain.machine.file_lock import one_at_a_time
from zerotrain.machine.regular_file import write_text

SAMPLES = "samples/samples.arrow"
BAD = "samples/bad.jsonl"
LEFT_OUT = "left_out"
LOCK = ".publishing.lock"

Bad = Mapping[str, str]
"""A refused sample: `file` and `reason`."""


class HasSplit(Protocol):
    """A sample of a dataset."""

    @property
    def split(self) -> Literal["train", "holdout"]:
        """Return the split that it belongs to."""


S = TypeVar("S", bound=HasSplit)


@dataclass(frozen=True)
class SampleType(Generic[S]):
    """A class of samples, and its form in JSON, which the identity is computed from."""

    record: type[S]
    to_json: Callable[[S], dict[str, Any]]


@dataclass(frozen=True)
class PublishedDataset(Generic[S]):
    """The manifest of a published dataset."""

    artifact: Artifact
    samples: Columns[S]
    """Images in the order of their file names, conversations in the order of the source."""
    repeats: int

    def split(self, name: Literal["train", "holdout"]) -> tuple[S, ...]:
        """Select the samples of one split, in order."""
        return tuple(sample for sample in self.samples if sample.split == name)


def count_samples(samples: Sequence[HasSplit], bad: Sequence[Bad]) -> dict[str, int]:
    """Count the samples of each split, and those that are bad."""
    splits = Counter(sample.split for sample in samples)
    return {"train": splits["train"], "holdout": splits["holdout"], "bad": len(bad)}


def publish_dataset(
    folder: Path,
    of: SampleType[S],
    samples: Sequence[S],
    *,
    repeats: int,
    bad: Sequence[Bad] = (),
    left_out: LeftOut | None = None,
    made_by: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """Publish a dataset; its caches in the folder stay.

    Runs that share a dataset may publish it at once: one waits for the other.

    Args:
        folder: Its folder.
        of: The class of its samples.
        samples: The usable samples.
        repeats: How often an epoch sees each.
        bad: The others.
        left_out: Counts the names in the source that are not used.
        made_by: Facts about its maker, no part of its identity.
        recipe: What it records of what it is made from.

    Returns:
        The file that lists the bad samples.

    Raises:
        PipelineError: something else is in the lock's place.
        DiskError: the disk is full or read-only, or fails.
    """
    facts: dict[str, Any] = {"repeats": repeats, "count": count_samples(samples, bad)}
    if left_out is not None and (counts := left_out.counts()):
        facts[LEFT_OUT] = counts
    check_no_file(folder)
    with one_at_a_time(folder / LOCK):
        return _publish(folder, of, samples, bad, facts, made_by, recipe)


def _publish(
    folder: Path,
    of: SampleType[S],
    samples: Sequence[S],
    bad: Sequence[Bad],
    facts: dict[str, Any],
    made_by: Mapping[str, Any] | None,
    recipe: Recipe | None,
) -> Path:
    identity = _identity(of, samples, bad, facts)
    # Where the file system has no locks, a manifest must not vouch for another writer's columns.
    known = {}
    with artifact.replacing(folder / SAMPLES) as new:
        Columns.of(of.record, samples).write(new)
        known[SAMPLES] = artifact.file_sha256(new)
    if bad:
        with artifact.replacing(folder / BAD) as new:
            write_text(new, "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in bad))
            known[BAD] = artifact.file_sha256(new)
    else:
        (folder / BAD).unlink(missing_ok=True)
    sync((folder / SAMPLES).parent)
    content = {**facts, IDENTITY: identity}
    artifact.publish_manifest(
        folder,
        DATASET,
        content,
        made_by=made_by,
        files=sorted(known),
        known=known,
        recipe=recipe,
    )
    return folder / BAD


def compute_identity(found: Artifact, of: SampleType[S], samples: Sequence[S]) -> str:
    """Compute the identity of a dataset, which its manifest states, from its samples.

    Raises:
        PipelineError: bad.jsonl cannot be read.
    """
    facts = {name: value for name, value in found.content.items() if name != IDENTITY}
    return _identity(of, samples, read_bad(found), facts)


def _identity(
    of: SampleType[S], samples: Sequence[S], bad: Sequence[Bad], facts: Mapping[str, Any]
) -> str:
    # What is left out of the source is no part of the dataset.
    content = {name: value for name, value in facts.items() if name != LEFT_OUT}
    content |= {"samples": map(of.to_json, samples), "bad": iter(bad)}
    return artifact.streamed_digest({"kind": DATASET, "content": content, "files": {}})


def read_samples(found: Artifact, of: SampleType[S]) -> Columns[S]:
    """Read the samples of a dataset.

    Raises:
        PipelineError: samples.arrow cannot be read, or is of another class.
    """
    path = found.path(SAMPLES)
    try:
        return read_columns(path, of.record)
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"{path}: {error}", hint=rebuild_hint(found.folder, found.kind, found.parents)
        ) from error


def read_repeats(found: Artifact) -> int:
    """Read how often an epoch sees each sample.

    Raises:
        PipelineError: the manifest does not say it.
    """
    repeats = found.content.get("repeats")
    if isinstance(repeats, int) and repeats > 0:
        return repeats
    raise _damaged(found, f"repeats is {repeats!r:.40}, not a number of times")


def read_left_out(found: Artifact) -> LeftOut:
    """Read the names in a dataset's source that are not used.

    Raises:
        PipelineError: the manifest has no such numbers.
    """
    where = found.folder / MANIFEST
    return LeftOut(check_type(found.content.get(LEFT_OUT, {}), dict[str, dict[str, int]], where))


def _damaged(found: Artifact, why: str) -> PipelineError:
    return PipelineError(
        f"{found.folder / MANIFEST}: {why}",
        hint=rebuild_hint(found.folder, found.kind, found.parents),
    )


def read_bad(found: Artifact) -> list[Bad]:
    """Read the refused samples of a dataset.

    Raises:
        PipelineError: bad.jsonl cannot be read.
    """
    if BAD not in found.files:
        return []
    return [*read_json_lines(found.path(BAD))]
