"""Formats of a walk: text with a line per folder, a JSON document, and a Mermaid flowchart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerotrain.run.lineage.chain import SHORT, Finding, Node, Walk
from zerotrain.state.ran_on import RanOn

FORMAT = 1
BROKEN = "classDef broken stroke:#c00,stroke-width:3px"
BARE = ("family", "dtype", "preset", "optimizer", "base", "to", "of", "source")
"""Facts that are shown without their names."""
COUNTS = {"train": "to train on", "holdout": "held out"}
DIGESTS = ("commit",)
RAN_ON = ("ran_on", "history")
MADE_FROM = ("checkpoint", "state", "weights")
"""Parents that come from the same training as the folder itself."""
SOFT = {"moved": "moved", "copy": "a copy", "place": "by its place"}
"""How the text marks parents that are not at the recorded path."""


def text(walk: Walk) -> str:
    """Format as text: the tree, findings, notes, and a verdict in the last line."""
    lines = [] if walk.root == Path.cwd() else [f"in {walk.root}:"]
    lines.append(_line(walk.start, ""))
    lines += _below(walk.start, "", {id(walk.start)})
    for heading, entries in (
        ("findings", [said_of(finding) for finding in walk.findings]),
        ("notes", [note for node in walk.nodes for note in node.notes]),
    ):
        lines += ["", f"{heading}:", *(f"  {one}" for one in entries)] if entries else []
    return "\n".join([*lines, "", verdict(walk)]) + "\n"


def verdict(walk: Walk) -> str:
    """Summarize the chain in one sentence."""
    if not walk.whole:
        number = len(walk.findings)
        return f"NOT WHOLE: {number} finding{'s' * (number > 1)}, named above"
    folders = [node for node in walk.nodes if node.artifact]
    files = sum(len(node.artifact.files) for node in folders if node.artifact)
    samples = sum(node.facts.get("samples", 0) for node in walk.nodes if node.kind == "source")
    total = size(sum(node.bytes for node in folders))
    return (
        f"whole: {len(folders)} folder{'s' * (len(folders) > 1)}, {files} files ({total}) "
        f"and {samples:,} samples are what the manifests say"
    )


def said_of(finding: Finding) -> str:
    """Format a finding as a line."""
    return (
        f"{finding.problem.upper()} {finding.path}: "
        f"expected {finding.expected}; found {finding.found}"
    )


def document(walk: Walk) -> str:
    """Format the walk as JSON with stable keys."""
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
    return json.dumps(found, indent=1) + "\n"


def flowchart(walk: Walk) -> str:
    """Draw a flowchart from the sources down to the weights; boxes with findings are marked."""
    name = {id(node): f"n{number}" for number, node in enumerate(walk.nodes)}
    lines = ["flowchart TB"]
    for node in walk.nodes:
        mark = ":::broken" if node.findings else ""
        lines.append(f'  {name[id(node)]}["{_label(node)}"]{mark}')
    for node in walk.nodes:
        for link in node.links:
            arrow = "-->" if link.how == "stated" else "-.->"
            lines.append(f"  {name[id(link.node)]} {arrow}|{link.name}| {name[id(node)]}")
    return "\n".join([*lines, f"  {BROKEN}"]) + "\n"


def quoted(text: str) -> str:
    """Escape a user's names, which may contain Mermaid or HTML markup."""
    marks = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"}
    return "".join(marks.get(letter, letter) for letter in text)


def described(facts: dict[str, Any]) -> str:
    """Describe facts in a few words."""
    words = [_fact(key, value) for key, value in facts.items() if key not in RAN_ON]
    return ", ".join(word for word in [*words, RanOn.of_manifest(facts, 0).brief] if word)


def _own_facts(node: Node) -> dict[str, Any]:
    """Return the facts that no parent repeats."""
    before = [link.node.facts for link in node.links if link.name in MADE_FROM]
    known = any("ran_on" in facts for facts in before)
    return {key: value for key, value in node.facts.items() if not known or key not in RAN_ON}


def size(count: int) -> str:
    """Format a number of bytes, in powers of ten."""
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


def _label(node: Node) -> str:
    words = [node.kind, node.path, str(node.identity)[:SHORT] if node.identity else ""]
    return "<br>".join(quoted(word) for word in [*words, described(_own_facts(node))] if word)


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
    elif node.kind not in ("source", "external"):
        words.append(f"[{node.kind}: gone]")
    if facts := described(_own_facts(node)):
        words.append(facts)
    return "  ".join([*words, *(["<- see findings"] if node.findings else [])])


def _fact(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{count:,} {COUNTS.get(name, name)}"
            for name, count in value.items()
            if count and isinstance(count, int)
        )
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
