"""A chain: folders with the parents that they name, and their findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zerotrain.artifact import Artifact

How = Literal["said", "moved", "copy", "beside"]
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
    how: How = "said"
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
