"""The folders that a run was made of and has made, by the hashes that their manifests record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.layout import OF_PHASE
from zerotrain.run.report.parts import Table
from zerotrain.run.view import RunView

SHORT = 12
"""Digits of an identity that are shown."""


@dataclass(frozen=True)
class Node:
    """A folder of the run's lineage."""

    path: Path
    artifact: Artifact | None
    """None if the folder is not here."""


def walk_lineage(view: RunView) -> list[Node]:
    """Return the folders of the run's phases after the folders that those were made from."""
    found: dict[Path, Node] = {}
    for phase in view.started:
        for name in OF_PHASE:
            if artifact.is_published(phase.folder / name):
                _walk(phase.folder / name, found)
    return list(found.values())


def lineage_table(nodes: Sequence[Node]) -> Table:
    """Return a row for each folder: its kind, its identity and its parents with theirs."""
    identities = {node.path: node.artifact.identity for node in nodes if node.artifact}
    rows = [
        [
            node.path.as_posix(),
            node.artifact.kind if node.artifact else "not here",
            identities.get(node.path, "")[:SHORT],
            ", ".join(_parents(node.artifact, identities)) if node.artifact else "",
        ]
        for node in nodes
    ]
    return Table(rows, ["folder", "kind", "identity", "made from"])


def _walk(path: Path, found: dict[Path, Node]) -> None:
    if path in found:
        return
    if not artifact.is_published(path):
        found[path] = Node(path, None)
        return
    read = artifact.read_manifest(path, artifact.kind_of(path) or "")
    for parent in read.parents.values():
        _walk(Path(parent["path"]), found)
    found[path] = Node(path, read)


def _parents(read: Artifact, identities: dict[Path, str]) -> Iterator[str]:
    for name, parent in read.parents.items():
        identity = parent["identity"]
        now = identities.get(Path(parent["path"]))
        changed = "" if now in (None, identity) else " (it has changed since)"
        yield f"{name} {identity[:SHORT]}{changed}"
