"""A chain: folders, each with the parents that it names, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zerotrain.artifact import Artifact
from zerotrain.lineage.verify import Finding

How = Literal["said", "moved", "copy", "beside"]


@dataclass
class Node:
    """A folder of the chain, or what a dataset was made from."""

    path: str
    kind: str
    artifact: Artifact | None = None
    links: list[Link] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def identity(self) -> str | None:
        """What the folder is; None where there is no manifest to tell."""
        return self.artifact.identity if self.artifact else None

    @property
    def bytes(self) -> int:
        """Of the listed files, as the manifest has it."""
        return sum(entry["bytes"] for entry in self.artifact.files.values()) if self.artifact else 0

    def parent(self, *names: str) -> Node | None:
        """The first parent of one of these names."""
        return next((link.node for link in self.links if link.name in names), None)


@dataclass
class Link:
    """A parent as its child names it."""

    name: str
    identity: str | None
    """What the child says that it is; None where nothing does."""
    node: Node
    how: How = "said"
    """Found where it is said to be; moved, as the child was; a copy of what is missing there; or
    by its place beside what is missing or names no parents."""


@dataclass
class Walk:
    """A chain, from the folder that was asked for."""

    root: Path
    start: Node
    nodes: list[Node]
    """Each once, children before parents."""

    @property
    def findings(self) -> list[Finding]:
        """All that breaks the chain."""
        return [finding for node in self.nodes for finding in node.findings]

    @property
    def whole(self) -> bool:
        """Whether nothing does."""
        return not self.findings
