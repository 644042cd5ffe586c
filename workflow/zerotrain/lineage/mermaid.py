"""A walk as a flowchart of Mermaid, from the sources down to the weights."""

from __future__ import annotations

from zerotrain.lineage.chain import Node, Walk
from zerotrain.lineage.report import described
from zerotrain.lineage.verify import SHORT

BROKEN = "classDef broken stroke:#c00,stroke-width:3px"


def flowchart(walk: Walk) -> str:
    """A box for each folder; those with findings are marked."""
    name = {id(node): f"n{number}" for number, node in enumerate(walk.nodes)}
    lines = ["flowchart TB"]
    for node in walk.nodes:
        mark = ":::broken" if node.findings else ""
        lines.append(f'  {name[id(node)]}["{_label(node)}"]{mark}')
    for node in walk.nodes:
        for link in node.links:
            arrow = "-->" if link.how == "said" else "-.->"
            lines.append(f"  {name[id(link.node)]} {arrow}|{link.name}| {name[id(node)]}")
    return "\n".join([*lines, f"  {BROKEN}"]) + "\n"


def _label(node: Node) -> str:
    words = [node.kind, node.path, str(node.identity)[:SHORT] if node.identity else ""]
    return "<br>".join(quoted(word) for word in [*words, described(node.facts)] if word)


def quoted(text: str) -> str:
    """Text of a user's names, which may hold what Mermaid or its HTML would read as its own."""
    marks = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"}
    return "".join(marks.get(letter, letter) for letter in text)
