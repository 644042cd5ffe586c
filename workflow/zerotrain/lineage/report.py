"""A walk as text, a line for each folder, and as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerotrain.lineage.chain import Node, Walk
from zerotrain.lineage.verify import SHORT, Finding

FORMAT = 1
BARE = ("family", "dtype", "preset", "optimizer", "base", "to", "of", "source")
"""Facts that are shown without their names."""
COUNTS = {"train": "to train on", "holdout": "held out"}
DIGESTS = ("commit", "code")
SOFT = {"moved": "moved", "copy": "a copy", "beside": "by its place"}
"""How the text marks parents that do not lie where a child says."""


def text(walk: Walk) -> str:
    """The tree, what was found, notes, and a verdict in the last line."""
    lines = [] if walk.root == Path.cwd() else [f"in {walk.root}:"]
    lines.append(_line(walk.start, ""))
    lines += _below(walk.start, "", {id(walk.start)})
    for heading, said in (
        ("findings", [said_of(finding) for finding in walk.findings]),
        ("notes", [note for node in walk.nodes for note in node.notes]),
    ):
        lines += ["", f"{heading}:", *(f"  {one}" for one in said)] if said else []
    return "\n".join([*lines, "", verdict(walk)]) + "\n"


def verdict(walk: Walk) -> str:
    """One sentence on the whole chain."""
    if not walk.whole:
        number = len(walk.findings)
        return f"NOT WHOLE: {number} finding{'s' * (number > 1)}, named above"
    folders = [node for node in walk.nodes if node.artifact]
    files = sum(len(node.artifact.files) for node in folders if node.artifact)
    samples = sum(node.facts.get("samples", 0) for node in walk.nodes if node.kind == "source")
    return (
        f"whole: {len(folders)} folders, {files} files ({size(sum(n.bytes for n in folders))}) "
        f"and {samples:,} samples are what the manifests say"
    )


def said_of(finding: Finding) -> str:
    """A finding as a line."""
    return (
        f"{finding.problem.upper()} {finding.path}: "
        f"expected {finding.expected}; found {finding.found}"
    )


def document(walk: Walk) -> str:
    """The walk as JSON, with keys that stay."""
    place = {id(node): number for number, node in enumerate(walk.nodes)}
    found = {
        "format": FORMAT,
        "root": str(walk.root),
        "weights": walk.start.path,
        "whole": walk.whole,
        "verdict": verdict(walk),
        "artifacts": [_entry(node, place) for node in walk.nodes],
        "findings": [vars(finding) for finding in walk.findings],
        "notes": [note for node in walk.nodes for note in node.notes],
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def described(facts: dict[str, Any]) -> str:
    """Facts in a few words."""
    return ", ".join(word for key, value in facts.items() if (word := _fact(key, value)))


def size(count: int) -> str:
    """Bytes as a person reads them, in powers of ten."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def _entry(node: Node, place: dict[int, int]) -> dict[str, Any]:
    return {
        "path": node.path,
        "kind": node.kind,
        "identity": node.identity,
        "files": len(node.artifact.files) if node.artifact else 0,
        "bytes": node.bytes,
        "facts": node.facts,
        "whole": not node.findings,
        "parents": [
            {
                "name": link.name,
                "path": link.node.path,
                "identity": link.identity,
                "artifact": place[id(link.node)],
                "how": link.how,
            }
            for link in node.links
        ],
    }


def _below(node: Node, indent: str, shown: set[int]) -> Iterator[str]:
    for link in node.links:
        last = link is node.links[-1]
        line = _line(link.node, link.name + (f" ({SOFT[link.how]})" if link.how in SOFT else ""))
        before = id(link.node) in shown
        if before:
            line = f"{link.name}: {link.node.path} (see above)"
        yield f"{indent}{'└─ ' if last else '├─ '}{line}"
        if not before:
            shown.add(id(link.node))
            yield from _below(link.node, indent + ("   " if last else "│  "), shown)


def _line(node: Node, role: str) -> str:
    words = [f"{role}: {node.path}" if role else node.path]
    if node.artifact:
        kind = "" if role == node.kind else f"{node.kind} "
        words.append(f"[{kind}{str(node.identity)[:SHORT]}]")
        if number := len(node.artifact.files):
            words.append(f"{number} file{'s' * (number > 1)}, {size(node.bytes)}")
    elif node.kind not in ("source", "elsewhere"):
        words.append(f"[{node.kind}: gone]")
    if facts := described(node.facts):
        words.append(facts)
    return "  ".join([*words, *(["<- see findings"] if node.findings else [])])


def _fact(key: str, value: Any) -> str:
    if isinstance(value, dict):
        counts = ((count, COUNTS.get(name, name)) for name, count in value.items())
        return ", ".join(f"{count:,} {name}" for count, name in counts if count)
    if isinstance(value, bool) or (key == "repeats" and value == 1):
        return key if value is True else ""
    name = key.replace("_", " ")
    if key in BARE:
        return str(value)
    if key in DIGESTS:
        return f"{name} {str(value)[:SHORT]}"
    if key == "samples":
        return f"{value:,} samples"
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
