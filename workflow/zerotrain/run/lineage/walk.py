"""The walk from a published folder through its parents, past any missing ones.

Identities bind kind, content and files, so a parent with the identity that its child records cannot
have been made from anything else. Nothing binds which parents a folder names, so the walk searches
for those that its kind requires.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, Artifact, sizes_digest
from zerotrain.artifact.documents import read_object
from zerotrain.errors import PipelineError
from zerotrain.models.base_places import read_selections
from zerotrain.run.lineage.chain import (
    SHORT,
    ArtifactIndex,
    Files,
    Finding,
    How,
    Link,
    Node,
    Problem,
    UnreadableError,
    Walk,
    facts_of,
    has_manifest,
    load,
    unlisted,
)
from zerotrain.run.lineage.compare_source import compare_source
from zerotrain.training.checkpointing.conditions import TRAINS

KINDS = {"start": "state"}
"""Kinds of parents with another name."""
ORDER = ("checkpoint", "weights", "state", "launch", "cache", "dataset", "base", "start")
"""The order of parents; the previous phase comes after the parents that both phases share."""
TRAINED_ON = {"cache": "checkpoint.json", "start": MANIFEST}
"""Parents of rolling checkpoints, and the file that records their identities."""
WANTED = {
    "weights": (("checkpoint", "state", "weights"), ("base", "weights")),
    "exported": (("weights", "checkpoint", "state"),),
    "state": (("checkpoint", "state"),),
    "checkpoint": (("launch",), ("base",), ("cache",)),
    "cache": (("dataset",), ("base",)),
    "universal": (("checkpoint", "state"),),
    **dict.fromkeys(("launch", "dataset", "base", "evaluation", "report"), ()),
}
"""Required parents by kind: one of each group, or the origin is unknown."""


class Walker:
    """A walk in one project. Without `files` it reads only manifests and the files of facts."""

    def __init__(self, index: ArtifactIndex, files: Files | None = None) -> None:
        self._index = index
        self._files = files
        self._nodes: dict[Path, Node] = {}
        self._reported: set[tuple[str, str]] = set()
        """Paths and identities that already have a finding."""
        self._moves: list[tuple[Path, Path]] = []
        """Folders as manifests name them, and the current place of their content."""

    def walk(self, folder: Path) -> Walk:
        """Walk through everything that a folder was made from."""
        self._nodes, self._reported, self._moves = {}, set(), []
        start = self._visit(folder, "weights")
        self._add_unreadable(start, folder)
        return Walk(self._index.root, start, [*self._nodes.values()])

    def _visit(self, folder: Path, kind: str) -> Node:
        key = folder.resolve()
        if key in self._nodes:
            return self._nodes[key]
        shown = self._index.display(folder)
        node = self._nodes[key] = Node(shown, kind)
        try:
            found = load(folder)
        except UnreadableError:
            node.links = self._by_place(folder, kind)
            return node
        node.artifact, node.kind = found, found.kind
        if found.kind not in WANTED:
            wanted = f"a kind of folder: {', '.join(WANTED)}"
            node.findings.append(Finding("unknown", f"{shown}/{MANIFEST}", wanted, found.kind))
        damaged: list[Finding] = []
        if self._files:
            damaged = self._files.check(found, shown)
            node.findings += damaged
            self._add_unlisted(node, found)
        node.facts = facts_of(found)
        names = [name for name in _ordered(found) if not self._is_left_behind(node, found, name)]
        node.links = [self._link(found, name, found.parents[name]) for name in names]
        node.links += self._undeclared_parents(found)
        if found.kind == "base":
            node.links += self._taken_from(node, found)
        self._ask_for_the_rest(node, found)
        node.findings += _disagreements(node)
        if found.kind == "dataset" and self._files:
            source = compare_source(found, self._index, damaged=bool(damaged))
            self._nodes[found.folder / "source"] = source
            node.links.append(Link("source", None, source))
        return node

    def _add_unreadable(self, node: Node, folder: Path) -> None:
        if node.artifact is None and (trouble := self._trouble(folder, None)):
            problem, path, found = trouble
            node.findings.append(Finding(problem, path, "what the folder holds", found))

    def _add_unlisted(self, node: Node, found: Artifact) -> None:
        """Add files that no manifest lists: in weights another program might load them."""
        for name in unlisted(found):
            if node.kind in ("weights", "exported"):
                expected = f"a file that {MANIFEST} lists"
                finding = Finding("unknown", f"{node.path}/{name}", expected, "not listed")
                node.findings.append(finding)
            else:
                node.notes.append(f"{node.path}/{name}: not listed, never read")

    def _link(self, child: Artifact, name: str, recorded: dict[str, str]) -> Link:
        folder, identity = self._index.resolve(recorded["path"]), recorded["identity"]
        kind = KINDS.get(name, name)
        trouble = self._trouble(folder, identity)
        if trouble is None:
            return Link(name, identity, self._visit(folder, kind))
        how: How = "stated"
        if moved := self._moved(child.folder, recorded):
            folder, how = moved, "moved"
        elif copies := self._index.find_by_identity(identity):
            folder, how = copies[0].folder, "copy"
        node = self._visit(folder, kind)
        problem, path, found = trouble
        if how != "moved" and (path, identity) not in self._reported:
            # Another child with the same record adds nothing; one with a different record is
            # reported too.
            self._reported.add((path, identity))
            sayer = f"{self._index.display(child.folder)}/{MANIFEST}"
            expected = f"{kind} {identity[:SHORT]}, as {sayer} says"
            node.findings.append(Finding(problem, path, expected, found))
        if how != "stated":
            note = f"{path}: {found}; the same {kind} is at {node.path}"
            node.notes += [note] if note not in node.notes else []
        return Link(name, identity, node, how)

    def _is_left_behind(self, node: Node, child: Artifact, name: str) -> bool:
        """Return whether a parent is the dataset that a base was built for, and was edited since: a
        base stays as it is built."""
        if child.kind != "base" or name != "dataset":
            return False
        recorded = child.parents[name]
        folder, identity = self._index.resolve(recorded["path"]), recorded["identity"]
        trouble = self._trouble(folder, identity)
        if trouble is None or trouble[0] != "different" or self._index.find_by_identity(identity):
            return False
        node.notes.append(
            f"{node.path}: built for an earlier state of {trouble[1]}, dataset {identity[:SHORT]}"
        )
        return True

    def _trouble(self, folder: Path, identity: str | None) -> tuple[Problem, str, str] | None:
        """Return how a folder differs from a child's record: problem, place, and what was found."""
        try:
            found = load(folder)
        except UnreadableError as error:
            problem: Problem = "different" if os.path.exists(error.path) else "missing"
            return problem, self._index.display(error.path), str(error)
        if identity in (None, found.identity):
            return None
        return "different", self._index.display(folder), f"{found.kind} {found.identity[:SHORT]}"

    def _moved(self, child: Path, recorded: dict[str, str]) -> Path | None:
        """Find a parent that moved along with its child, if its recorded place is empty.

        A move that was found for one parent is tried for the next, which may have another child.
        """
        path = Path(recorded["path"])
        if os.path.exists(self._index.resolve(path)):
            return None
        for old, new in self._moves:
            if path.is_relative_to(old):
                folder = new / path.relative_to(old)
                if self._trouble(folder, recorded["identity"]) is None:
                    return folder
        for length in range(len(path.parts), 0, -1):
            for above in child.parents:
                folder = above.joinpath(*path.parts[-length:])
                if self._trouble(folder, recorded["identity"]) is None:
                    self._moves.append((Path(*path.parts[:-length]), above))
                    return folder
        return None

    def _by_place(self, folder: Path, kind: str) -> list[Link]:
        """Find the parents of a folder that records none, by the layout of a run."""
        phase = folder.parent.parent if folder.parent.name == "progress" else folder.parent
        places = {
            "weights": {"checkpoint": phase / "checkpoint", "base": phase.parent / "base"},
            "state": {"checkpoint": phase / "checkpoint", "base": phase.parent / "base"},
            "checkpoint": {"launch": phase / "launch", "base": phase.parent / "base"},
            "cache": {"dataset": folder.parent.parent},
        }.get(kind, {})
        found = {name: place for name, place in places.items() if has_manifest(place)}
        links = [Link(name, None, self._visit(at, name), "place") for name, at in found.items()]
        if kind != "checkpoint":
            return links
        trained_on = _trained_on(folder, phase / "progress")
        for name in TRAINED_ON:
            identity = trained_on.get(name)
            same_as = self._index.find_by_identity(identity) if isinstance(identity, str) else ()
            for same in same_as[:1]:
                links.append(Link(name, identity, self._visit(same.folder, same.kind), "place"))
        return links

    def _undeclared_parents(self, child: Artifact) -> list[Link]:
        """Check external checkpoints and models, which have no manifest, by names and sizes."""
        links = []
        for name in ("checkpoint", "base"):
            recorded = child.made_by.get(name)
            if name in child.parents or not isinstance(recorded, dict) or "files" not in recorded:
                continue
            place = self._index.resolve(Path(recorded["path"]).expanduser())
            shown = self._index.display(place)
            node = self._nodes.setdefault(place.resolve(), Node(shown, "external"))
            node.facts = {"of": "another program, known by names and sizes alone"}
            expected = f"names and sizes {recorded['files'][:SHORT]}"
            if not os.path.exists(place):
                node.findings.append(Finding("missing", shown, expected, "nothing"))
            elif (found := sizes_digest(place)) != recorded["files"]:
                what = f"names and sizes {found[:SHORT]}"
                node.findings.append(Finding("different", shown, expected, what))
            links.append(Link(name, None, node))
        return links

    def _taken_from(self, node: Node, base: Artifact) -> list[Link]:
        """Find published folders that a base is a copy of, such as another run's weights. The base
        records only their path: a folder without any of its tensors has changed since."""
        links = []
        for place in _places(base):
            folder = self._index.resolve(place)
            if not has_manifest(folder):
                continue
            above = self._visit(folder, "weights")
            self._add_unreadable(above, folder)
            if above.artifact and not _tensors(base) & _tensors(above.artifact):
                above.notes.append(f"{above.path}: none of {node.path}'s tensors is in it any more")
            links.append(Link(above.kind, None, above))
        return links

    def _ask_for_the_rest(self, node: Node, found: Artifact) -> None:
        """Find the parents that the kind requires by their place, or add a finding."""
        named = {link.name for link in node.links}
        groups = [group for group in WANTED.get(found.kind, ()) if not named & {*group}]
        by_place: dict[str, Link] = {}
        if groups or (found.kind == "checkpoint" and "start" not in named):
            by_place = {link.name: link for link in self._by_place(found.folder, found.kind)}
        node.links += [by_place[name] for group in groups for name in group if name in by_place]
        trains = found.content.get(TRAINS)
        if isinstance(trains, dict) and trains.get("start") and "start" not in named:
            groups.append(("start",))
            node.links += [by_place["start"]] if "start" in by_place else []
        rolling = found.folder.parent.name == "progress"
        for group in groups:
            if rolling and by_place.keys() & {*group}:
                continue
            if "launch" in group:  # the checkpoint records what was trained
                continue
            wanted = f"a parent: {' or '.join(group)}"
            path = f"{node.path}/{MANIFEST}"
            if rolling and {*group} & {*TRAINED_ON}:
                (name, *_) = {*group} & {*TRAINED_ON}
                path = self._index.display(found.folder / TRAINED_ON[name])
                wanted = f"the identity of a {' or '.join(group)} under results/"
            node.findings.append(Finding("unknown", path, wanted, "none is named"))


def _disagreements(node: Node) -> list[Finding]:
    """List where a folder contradicts its origin. Nothing else verifies weights that have no
    descendants yet."""
    origins = {"step": node.parent("checkpoint", "state", "weights"), "family": node.parent("base")}
    if node.kind == "state":  # its step is in a file, which is checked against its hash
        origins = {key: origin for key, origin in origins.items() if key in node.facts}
    return [
        Finding("different", f"{node.path}/{MANIFEST}", f"{key} {expected}, as {origin.path} says",
                f"{key} {node.facts.get(key)}")
        for key, origin in origins.items()
        if node.kind in ("weights", "exported", "state") and origin
        and (expected := origin.facts.get(key)) is not None and expected != node.facts.get(key)
    ]  # fmt: skip


def _places(base: Artifact) -> list[Path]:
    """List the recorded places that a base was taken from; not all are folders."""
    recorded = base.content.get("base")
    if not isinstance(recorded, str):
        return []
    try:
        names = [selection.place for selection in read_selections(recorded)] or [recorded]
    except PipelineError:
        return []
    return [*dict.fromkeys(Path(name).expanduser() for name in names)]


def _tensors(folder: Artifact) -> set[str]:
    return {one["sha256"] for name, one in folder.files.items() if name.endswith(".safetensors")}


def _ordered(found: Artifact) -> list[str]:
    return sorted(
        found.parents, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)
    )


def _trained_on(folder: Path, progress: Path) -> dict[str, Any]:
    """Return the identities of the cache and the start that a checkpoint was trained on.

    If its manifest is missing, they come from the newest rolling checkpoint.
    """
    for place in (folder, *sorted(progress.glob("step-*"), reverse=True)):
        with suppress(UnreadableError):
            trains = load(place).content.get(TRAINS)
            if isinstance(trains, dict):
                ran_on = _read_json(place / TRAINED_ON["cache"]).get("ran_on")
                cache = ran_on.get("cache") if isinstance(ran_on, dict) else None
                return {"cache": cache, "start": trains.get("start")}
            break
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
