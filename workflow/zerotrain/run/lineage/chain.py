"""A chain: folders with the parents that they name, their findings, and facts about each: steps,
presets, learning rate, numbers of samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zerotrain.artifact import RECORDS, Artifact
from zerotrain.artifact.documents import read_object, read_yaml
from zerotrain.errors import PipelineError
from zerotrain.state.ran_on import RanOn

How = Literal["stated", "moved", "copy", "place"]
Problem = Literal["missing", "different", "unknown"]
SHORT = 12
"""Digits of a digest that are shown."""


@dataclass(frozen=True)
class Finding:
    """Something that breaks a chain."""

    problem: Problem
    """missing; different from its record; or unknown: its origin is not recorded."""
    path: str
    expected: str
    found: str


@dataclass
class Node:
    """A folder of the chain, or the source of a dataset."""

    path: str
    kind: str
    artifact: Artifact | None = None
    links: list[Link] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def identity(self) -> str | None:
        """Return the digest of the folder; None without a manifest."""
        return self.artifact.identity if self.artifact else None

    @property
    def bytes(self) -> int:
        """Return the total size of the files that the manifest lists."""
        return sum(entry["bytes"] for entry in self.artifact.files.values()) if self.artifact else 0

    def parent(self, *names: str) -> Node | None:
        """Return the first parent with one of these names."""
        return next((link.node for link in self.links if link.name in names), None)


@dataclass
class Link:
    """A parent, as its child records it."""

    name: str
    identity: str | None
    """The identity that the child records; None if it records none."""
    node: Node
    how: How = "stated"
    """How it was found: at the recorded path; moved with the child; as a copy; or by its place in
    the run's layout, next to a folder that is missing or names no parents."""


@dataclass
class Walk:
    """A chain, from the requested folder."""

    root: Path
    start: Node
    nodes: list[Node]
    """Each node once, children before parents."""

    @property
    def findings(self) -> list[Finding]:
        """List everything that breaks the chain."""
        return [finding for node in self.nodes for finding in node.findings]

    @property
    def whole(self) -> bool:
        """Return whether nothing breaks the chain."""
        return not self.findings


LAUNCH = ("preset", "learning_rate", "lr_scheduler", "global_batch_size", "start_step",
          "until_step", "epoch_size", "resolution", "seed")  # fmt: skip
POSITION = ("run", "phase", "step", "samples", "optimizer")
CONTENT = {
    "weights": ("family", "step", "dtype", "ema"),
    "exported": ("to", "family", "step", "dtype", "ema"),
    "cache": ("resolution", "max_length", "dtype", "count"),
    "dataset": ("count", "repeats"),
    "base": ("base", "family", "commit", "file_sha256"),
}
"""Keys of the content that are facts, by kind."""
COUNTS = ("step", "samples", "start_step", "until_step", "epoch_size")
"""Facts that must be integers."""
MADE_BY = ("run", "phase", "commit", "version")
SOURCE = f"{RECORDS}made_by.json"
"""Of a checkpoint: commit of the source that published it, and version of the stage."""
ENCODING = f"{RECORDS}encoding.json"
"""Of a cache: the software that encoded it."""


def facts_of(folder: Artifact) -> dict[str, Any]:
    """Return the facts about a folder under stable names; facts from damaged files are omitted."""
    try:
        found = {key: folder.content.get(key) for key in CONTENT.get(folder.kind, ())}
        made_by = source_of(folder)
        found |= {key: made_by.get(key) for key in MADE_BY}
        found["preset"] = _of(folder.made_by.get("engine"), "preset")
        if folder.kind == "launch":
            resolved = read_yaml(folder.folder / "run.yaml", version="1.1")
            found |= {key: _of(_of(resolved, key), "value") for key in LAUNCH}
        if folder.kind in ("checkpoint", "state"):
            position = read_object(folder.folder / f"{folder.kind}.json")
            found |= {key: position.get(key) for key in POSITION}
            found["preset"] = _of(position.get("engine"), "preset")
            groups = position.get("param_groups") or [{}]
            found["learning_rate"] = _of(groups[0], "lr")
            found |= RanOn.of_manifest(position, 0).made_by()
        elif folder.kind == "cache" and ENCODING in folder.files:
            software = read_object(folder.folder / ENCODING).get("software")
            found |= RanOn.of_encoding(software).made_by() if isinstance(software, dict) else {}
        else:
            found |= RanOn.of_manifest(folder.made_by, 0).made_by()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass  # verify compares the files with the manifest, and reports them
    return {
        key: value
        for key, value in found.items()
        if value is not None and (key not in COUNTS or type(value) is int)
    }


def source_of(folder: Artifact) -> dict[str, Any]:
    """Return the made_by of a folder; a checkpoint's commit and version come from its records."""
    if SOURCE not in folder.files:
        return folder.made_by
    try:
        found = read_object(folder.path(SOURCE))
    except (OSError, PipelineError):
        return folder.made_by
    facts = {key: value for key, value in found.items() if isinstance(value, str | int)}
    return {**folder.made_by, **facts}


def _of(found: Any, key: str) -> Any:
    return found.get(key) if isinstance(found, dict) else None
