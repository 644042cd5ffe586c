"""The walk from a published folder through its parents, past whatever is missing.

Identities bind kind, content and files, so a parent that is what its child says cannot have been
made of anything else. Which parents a folder names is bound by nothing: those that its kind must
have are asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, Artifact
from zerotrain.lineage.chain import How, Link, Node, Walk
from zerotrain.lineage.facts import facts_of
from zerotrain.lineage.origins import check_origins
from zerotrain.lineage.shelf import Shelf, Unreadable, load
from zerotrain.lineage.verify import SHORT, Files, Finding, Problem, sizes_digest, unlisted

KINDS = {"start": "state"}
"""Kinds of parents that go by another name."""
ORDER = ("checkpoint", "weights", "state", "launch", "cache", "dataset", "base", "start")
"""A phase before comes after what it shares with the one that goes on from it."""
WANTED = {
    "weights": (("checkpoint", "state", "weights"), ("base", "weights")),
    "exported": (("weights", "checkpoint", "state"),),
    "state": (("checkpoint", "state"),),
    "checkpoint": (("launch",), ("base",), ("cache",)),
    "cache": (("dataset",), ("base",)),
}
"""Parents without which a kind's origin is unknown: one of each group."""


class Walker:
    """Walks in one project. Without `files` nothing is read but manifests and what they list."""

    def __init__(self, shelf: Shelf, files: Files | None = None) -> None:
        self._shelf = shelf
        self._files = files
        self._nodes: dict[Path, Node] = {}
        self._moves: list[tuple[Path, Path]] = []
        """Folders as manifests name them, and where what was in them lies now."""

    def walk(self, folder: Path) -> Walk:
        """Everything that a folder was made from."""
        self._nodes = {}
        self._moves = []
        start = self._visit(folder, "weights")
        if start.artifact is None:
            why = self._trouble(folder, None)
            assert why
            path = f"{start.path}/{MANIFEST}"
            start.findings.append(Finding("missing", path, "what the folder holds", why[1]))
        return Walk(self._shelf.root, start, [*self._nodes.values()])

    def _visit(self, folder: Path, kind: str) -> Node:
        key = folder.resolve()
        if key in self._nodes:
            return self._nodes[key]
        shown = self._shelf.shown(folder)
        node = self._nodes[key] = Node(shown, kind)
        try:
            found = load(folder)
        except Unreadable:
            node.links = self._beside(folder, kind)
            return node
        node.artifact, node.kind = found, found.kind
        if self._files:
            node.findings += self._files.check(found, shown)
            self._tell_unlisted(node, found)
        node.facts = facts_of(found)
        node.links = [self._link(found, name, found.parents[name]) for name in _ordered(found)]
        node.links += self._strangers(found)
        self._ask_for_the_rest(node, found)
        node.findings += _disagreements(node)
        if found.kind == "dataset" and self._files:
            node.links.append(Link("source", None, self._source(found, shown)))
        return node

    def _tell_unlisted(self, node: Node, found: Artifact) -> None:
        """Nobody reads them here, but of weights they may be what another program loads."""
        for name in unlisted(found):
            if node.kind in ("weights", "exported"):
                expected = f"a file that {MANIFEST} lists"
                finding = Finding("unknown", f"{node.path}/{name}", expected, "not listed")
                node.findings.append(finding)
            else:
                node.notes.append(f"{node.path}/{name}: not listed, never read")

    def _link(self, child: Artifact, name: str, said: dict[str, str]) -> Link:
        folder, identity = self._shelf.place(said["path"]), said["identity"]
        kind, shown = KINDS.get(name, name), self._shelf.shown(folder)
        trouble = self._trouble(folder, identity)
        if trouble is None:
            return Link(name, identity, self._visit(folder, kind))
        how: How = "said"
        if moved := self._moved(child.folder, said):
            folder, how = moved, "moved"
        elif copies := self._shelf.same_as(identity):
            folder, how = copies[0].folder, "copy"
        node = self._visit(folder, kind)
        if how != "moved":
            problem, found = trouble
            finding = Finding(problem, shown, f"{kind} {identity[:SHORT]}", found)
            node.findings += [finding] if finding not in node.findings else []
        if how != "said":
            note = f"{shown}: {trouble[1]}; the same {kind} lies at {node.path}"
            node.notes += [note] if note not in node.notes else []
        return Link(name, identity, node, how)

    def _trouble(self, folder: Path, identity: str | None) -> tuple[Problem, str] | None:
        """Why a folder is not what it is said to be: the problem, and what was found."""
        try:
            found = load(folder)
        except Unreadable as error:
            return "missing", str(error)
        if identity in (None, found.identity):
            return None
        return "different", f"{found.kind} {found.identity[:SHORT]}"

    def _moved(self, child: Path, said: dict[str, str]) -> Path | None:
        """Where a parent lies that moved along with its child, if its own place is empty.

        What moved with one parent is tried for the next, which may lie beside another child.
        """
        path = Path(said["path"])
        if self._shelf.place(path).exists():
            return None
        for old, new in self._moves:
            if path.is_relative_to(old):
                folder = new / path.relative_to(old)
                if self._trouble(folder, said["identity"]) is None:
                    return folder
        for length in range(len(path.parts), 0, -1):
            for above in child.parents:
                folder = above.joinpath(*path.parts[-length:])
                if self._trouble(folder, said["identity"]) is None:
                    self._moves.append((Path(*path.parts[:-length]), above))
                    return folder
        return None

    def _beside(self, folder: Path, kind: str) -> list[Link]:
        """The parents of what says none itself: by the layout of a run, and a phase's progress."""
        phase = folder.parent.parent if folder.parent.name == "progress" else folder.parent
        places = {
            "weights": {"checkpoint": phase / "checkpoint", "base": phase.parent / "base"},
            "state": {"checkpoint": phase / "checkpoint", "base": phase.parent / "base"},
            "checkpoint": {"launch": phase / "launch", "base": phase.parent / "base"},
            "cache": {"dataset": folder.parent.parent},
        }.get(kind, {})
        found = {name: place for name, place in places.items() if (place / MANIFEST).is_file()}
        links = [Link(name, None, self._visit(at, name), "beside") for name, at in found.items()]
        if kind != "checkpoint":
            return links
        trained_on = _read_json(phase / "progress" / "fingerprint.json")
        for name in ("cache", "start"):
            identity = trained_on.get(name)
            for same in self._shelf.same_as(identity)[:1] if isinstance(identity, str) else ():
                links.append(Link(name, identity, self._visit(same.folder, same.kind), "beside"))
        return links

    def _strangers(self, child: Artifact) -> list[Link]:
        """Parents without a manifest: checkpoints and models of elsewhere, known by their sizes."""
        links = []
        for name in ("checkpoint", "base"):
            said = child.made_by.get(name)
            if name in child.parents or not isinstance(said, dict) or "files" not in said:
                continue
            place = self._shelf.place(Path(said["path"]).expanduser())
            shown = self._shelf.shown(place)
            node = self._nodes.setdefault(place.resolve(), Node(shown, "elsewhere"))
            node.facts = {"of": "another program, known by names and sizes alone"}
            expected = f"names and sizes {said['files'][:SHORT]}"
            if not place.exists():
                node.findings.append(Finding("missing", shown, expected, "nothing"))
            elif (found := sizes_digest(place)) != said["files"]:
                what = f"names and sizes {found[:SHORT]}"
                node.findings.append(Finding("different", shown, expected, what))
            links.append(Link(name, None, node))
        return links

    def _ask_for_the_rest(self, node: Node, found: Artifact) -> None:
        """Parents that the kind must have: found by their place, or a finding."""
        named = {link.name for link in node.links}
        groups = [group for group in WANTED.get(found.kind, ()) if not named & {*group}]
        beside: dict[str, Link] = {}
        if groups or (found.kind == "checkpoint" and "start" not in named):
            beside = {link.name: link for link in self._beside(found.folder, found.kind)}
        node.links += [beside[name] for group in groups for name in group if name in beside]
        launch = node.parent("launch")
        if launch and launch.facts.get("start_step") and "start" not in named:
            groups.append(("start",))
            node.links += [beside["start"]] if "start" in beside else []
        rolling = found.folder.parent.name == "progress"
        for group in groups:
            if not rolling or not beside.keys() & {*group}:
                path, wanted = f"{node.path}/{MANIFEST}", f"a parent: {' or '.join(group)}"
                node.findings.append(Finding("unknown", path, wanted, "none is named"))

    def _source(self, dataset: Artifact, shown: str) -> Node:
        node = Node(f"{shown} (source)", "source")
        node.path, node.facts, node.findings, node.notes = check_origins(dataset, self._shelf)
        self._nodes[dataset.folder / "source"] = node
        return node


def _disagreements(node: Node) -> list[Finding]:
    """What a folder says otherwise than its origin. Of weights that nothing was made from yet, no
    child says the identity."""
    told = {"step": node.parent("checkpoint", "state", "weights"), "family": node.parent("base")}
    return [
        Finding("different", f"{node.path}/{MANIFEST}", f"{key} {said}, as {origin.path} says",
                f"{key} {node.facts[key]}")
        for key, origin in told.items()
        if node.kind in ("weights", "exported", "state") and origin and key in node.facts
        and (said := origin.facts.get(key)) is not None and said != node.facts[key]
    ]  # fmt: skip


def _ordered(found: Artifact) -> list[str]:
    return sorted(
        found.parents, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
