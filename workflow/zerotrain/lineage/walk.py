"""The walk from a published folder through its parents, past whatever is missing.

Identities bind kind, content and files, so a parent that is what its child says cannot have been
made of anything else. Which parents a folder names is bound by nothing: those that its kind must
have are asked for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, Artifact, sizes_digest
from zerotrain.composed_base import read_selections
from zerotrain.errors import PipelineError
from zerotrain.lineage.chain import How, Link, Node, Walk
from zerotrain.lineage.facts import facts_of
from zerotrain.lineage.origins import check_origins
from zerotrain.lineage.shelf import Shelf, Unreadable, has_manifest, load
from zerotrain.lineage.verify import SHORT, Files, Finding, Problem, unlisted
from zerotrain.training.progress_folder import FINGERPRINT

KINDS = {"start": "state"}
"""Kinds of parents that go by another name."""
ORDER = ("checkpoint", "weights", "state", "launch", "cache", "dataset", "base", "start")
"""A phase before comes after what it shares with the one that goes on from it."""
TRAINED_ON = ("cache", "start")
"""Parents of rolling checkpoints whose identities the fingerprint of their progress says."""
WANTED = {
    "weights": (("checkpoint", "state", "weights"), ("base", "weights")),
    "exported": (("weights", "checkpoint", "state"),),
    "state": (("checkpoint", "state"),),
    "checkpoint": (("launch",), ("base",), ("cache",)),
    "cache": (("dataset",), ("base",)),
    "universal": (("checkpoint", "state"),),
    **dict.fromkeys(("launch", "dataset", "base", "evaluation", "report"), ()),
}
"""Every kind, with the parents without which its origin is unknown: one of each group."""


class Walker:
    """Walks in one project. Without `files` nothing is read but manifests and what they list."""

    def __init__(self, shelf: Shelf, files: Files | None = None) -> None:
        self._shelf = shelf
        self._files = files
        self._nodes: dict[Path, Node] = {}
        self._told: set[tuple[str, str]] = set()
        """Where something else than an identity was found."""
        self._moves: list[tuple[Path, Path]] = []
        """Folders as manifests name them, and where what was in them lies now."""

    def walk(self, folder: Path) -> Walk:
        """Everything that a folder was made from."""
        self._nodes, self._told, self._moves = {}, set(), []
        start = self._visit(folder, "weights")
        if start.artifact is None:
            trouble = self._trouble(folder, None)
            assert trouble
            problem, path, found = trouble
            start.findings.append(Finding(problem, path, "what the folder holds", found))
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
        if found.kind not in WANTED:
            wanted = f"a kind of folder: {', '.join(WANTED)}"
            node.findings.append(Finding("unknown", f"{shown}/{MANIFEST}", wanted, found.kind))
        if self._files:
            node.findings += self._files.check(found, shown)
            self._tell_unlisted(node, found)
        node.facts = facts_of(found)
        node.links = [self._link(found, name, found.parents[name]) for name in _ordered(found)]
        node.links += self._strangers(found)
        if found.kind == "base":
            node.links += self._taken_from(node, found)
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
        kind = KINDS.get(name, name)
        trouble = self._trouble(folder, identity)
        if trouble is None:
            return Link(name, identity, self._visit(folder, kind))
        how: How = "said"
        if moved := self._moved(child.folder, said):
            folder, how = moved, "moved"
        elif copies := self._shelf.same_as(identity):
            folder, how = copies[0].folder, "copy"
        node = self._visit(folder, kind)
        problem, path, found = trouble
        if how != "moved" and (path, identity) not in self._told:
            # The next child that says the same adds nothing; one that says otherwise is named too.
            self._told.add((path, identity))
            sayer = f"{self._shelf.shown(child.folder)}/{MANIFEST}"
            expected = f"{kind} {identity[:SHORT]}, as {sayer} says"
            node.findings.append(Finding(problem, path, expected, found))
        if how != "said":
            note = f"{path}: {found}; the same {kind} lies at {node.path}"
            node.notes += [note] if note not in node.notes else []
        return Link(name, identity, node, how)

    def _trouble(self, folder: Path, identity: str | None) -> tuple[Problem, str, str] | None:
        """Why a folder is not what it is said to be: the problem, where, and what was found."""
        try:
            found = load(folder)
        except Unreadable as error:
            problem: Problem = "different" if os.path.exists(error.path) else "missing"
            return problem, self._shelf.shown(error.path), str(error)
        if identity in (None, found.identity):
            return None
        return "different", self._shelf.shown(folder), f"{found.kind} {found.identity[:SHORT]}"

    def _moved(self, child: Path, said: dict[str, str]) -> Path | None:
        """Where a parent lies that moved along with its child, if its own place is empty.

        What moved with one parent is tried for the next, which may lie beside another child.
        """
        path = Path(said["path"])
        if os.path.exists(self._shelf.place(path)):
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
        found = {name: place for name, place in places.items() if has_manifest(place)}
        links = [Link(name, None, self._visit(at, name), "beside") for name, at in found.items()]
        if kind != "checkpoint":
            return links
        trained_on = _read_json(phase / "progress" / FINGERPRINT)
        for name in TRAINED_ON:
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
            if not os.path.exists(place):
                node.findings.append(Finding("missing", shown, expected, "nothing"))
            elif (found := sizes_digest(place)) != said["files"]:
                what = f"names and sizes {found[:SHORT]}"
                node.findings.append(Finding("different", shown, expected, what))
            links.append(Link(name, None, node))
        return links

    def _taken_from(self, node: Node, base: Artifact) -> list[Link]:
        """Published folders that a base is a copy of, such as another run's weights. It names them
        by path alone: one without any of its tensors has become another since."""
        links = []
        for place in _places(base):
            folder = self._shelf.place(place)
            if not has_manifest(folder):
                continue
            above = self._visit(folder, "weights")
            if above.artifact is None and (trouble := self._trouble(folder, None)):
                problem, path, found = trouble
                above.findings.append(Finding(problem, path, "what the folder holds", found))
            elif above.artifact and not _tensors(base) & _tensors(above.artifact):
                above.notes.append(f"{above.path}: none of {node.path}'s tensors is in it any more")
            links.append(Link(above.kind, None, above))
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
            if rolling and beside.keys() & {*group}:
                continue
            wanted = f"a parent: {' or '.join(group)}"
            path = f"{node.path}/{MANIFEST}"
            if rolling and {*group} & {*TRAINED_ON}:
                path = self._shelf.shown(found.folder.parent / FINGERPRINT)
                wanted = f"the identity of a {' or '.join(group)} under results/"
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
    if node.kind == "state":  # says its step in a file, which is held to its hash
        told = {key: origin for key, origin in told.items() if key in node.facts}
    return [
        Finding("different", f"{node.path}/{MANIFEST}", f"{key} {said}, as {origin.path} says",
                f"{key} {node.facts.get(key)}")
        for key, origin in told.items()
        if node.kind in ("weights", "exported", "state") and origin
        and (said := origin.facts.get(key)) is not None and said != node.facts.get(key)
    ]  # fmt: skip


def _places(base: Artifact) -> list[Path]:
    """What a base says that it was taken from: folders, or what are no folders."""
    said = base.content.get("base")
    if not isinstance(said, str):
        return []
    try:
        names = [selection.place for selection in read_selections(said)] or [said]
    except PipelineError:
        return []
    return [*dict.fromkeys(Path(name).expanduser() for name in names)]


def _tensors(folder: Artifact) -> set[str]:
    return {one["sha256"] for name, one in folder.files.items() if name.endswith(".safetensors")}


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
