"""What was it made of: data, configuration, launch files, lineage and environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import read_text
from zerotrain.artifact.layout import OF_PHASE
from zerotrain.launch.resolved import FILES, ResolvedPhase
from zerotrain.run.report.figures import Chapter, Missing, Panel, Picture, Table, draw_bars
from zerotrain.run.report.samples import webp
from zerotrain.run.view import RunView

if TYPE_CHECKING:
    from zerotrain.data.figures import Section


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


LAUNCH_FILES = ("accelerate.yaml", "deepspeed.json")
OWN = ("run", "phase", "start_step", "until_step", *FILES)
"""Values that differ between any two phases, and launch files, which are listed whole."""


@dataclass(frozen=True)
class Listing:
    """Text to copy."""

    title: str
    text: str
    shown: bool = False


@dataclass(frozen=True)
class Origin:
    """The fourth chapter: its panels, and texts to copy."""

    chapter: Chapter
    listings: Sequence[Listing]


@dataclass(frozen=True)
class Sources:
    """What the stage knows about the run's making, next to the folders of its phases."""

    data: Sequence[Section] = ()
    """Figures of the dataset; empty if it is not here."""
    sheet: bytes | None = None
    """A PNG with some of its samples."""
    commands: Sequence[str] = ()
    """Commands that make the run again."""
    loading: Mapping[str, str] = field(default_factory=dict)
    """Code that loads the weights of each phase, by its name."""


def trace_origin(
    view: RunView, nodes: Sequence[Node], sources: Sources, *, is_text: bool
) -> Origin:
    """Return the chapter about what the run was made of.

    Args:
        view: The run.
        nodes: Its folders and those that it was made from.
        sources: The data, the commands and the code.
        is_text: Whether it trains a language model, which has no contact sheet.
    """
    missing = Missing()
    panels = [
        *_data(sources, missing, is_text=is_text),
        *_differences(view),
        *_configurations(view, missing),
        *_environments(view, missing),
        *_lineage(nodes, missing),
    ]
    listings = [
        Listing("Make it again", "\n".join(sources.commands), shown=True),
        *(
            Listing(f"Load the weights of phase {name}", code)
            for name, code in sources.loading.items()
        ),
        *_launch_files(view),
    ]
    chapter = Chapter("origin", "What was it made of?", panels, missing.sentences)
    return Origin(chapter, [listing for listing in listings if listing.text])


def _data(sources: Sources, missing: Missing, *, is_text: bool) -> Iterator[Panel]:
    if not sources.data:
        missing.note("The dataset that was trained on is not here, so its figures are missing.")
        return
    if sources.sheet is not None:
        alt = "Samples of the dataset with their file names and captions"
        smallest = min(webp(sources.sheet), sources.sheet, key=len)
        yield Panel("Samples of the dataset", picture=Picture(alt, smallest))
    elif not is_text:
        missing.note("The images that were trained on are not here, so there is no contact sheet.")
    for section in sources.data:
        yield Panel(section.title, picture=_bars(section), table=Table(section.rows))


def _bars(section: Section) -> Picture | None:
    """Draw the kinds of samples of a section; None if there are fewer than two."""
    found = [(name, count) for name, count in section.counts if count]
    if len(found) < 2:
        return None
    names, counts = zip(*found, strict=True)
    return draw_bars(f"{section.title}: number of images", "images", names, {"": counts})


def _differences(view: RunView) -> Iterator[Panel]:
    """Yield the values in which the phases differ."""
    known = [(phase.name, phase.launch) for phase in view.started if phase.launch]
    if len(known) < 2:
        return
    values = {name: dict(_values(launch)) for name, launch in known}
    keys = dict.fromkeys(key for one in values.values() for key in one)
    rows = [
        [key, *cells]
        for key in keys
        if key.partition(".")[0] not in OWN
        and len(set(cells := [one.get(key, "") for one in values.values()])) > 1
    ]
    head = ["key", *(f"phase {name}" for name in values)]
    yield Panel("What the phases differ in", table=Table(rows, head))


def _values(launch: ResolvedPhase) -> Iterator[tuple[str, str]]:
    for name, value, _, _ in launch.explain():
        yield name, _text(value)


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _configurations(view: RunView, missing: Missing) -> Iterator[Panel]:
    for phase in view.started:
        if phase.launch is None:
            missing.note(f"Phase {phase.name} was launched by hand, so its values have no sources.")
            continue
        rows = [
            [name, _text(value), f"{source}: {reason}" if reason else source]
            for name, value, source, reason in phase.launch.explain()
        ]
        title = f"Configuration of phase {phase.name}"
        yield Panel(title, table=Table(rows, ["key", "value", "source"]), shown=False)


def _launch_files(view: RunView) -> Iterator[Listing]:
    for phase in view.started:
        for file in LAUNCH_FILES:
            path = phase.places.launch / file
            if phase.launch and path.is_file():
                yield Listing(f"{file} of phase {phase.name}", read_text(path))


def _environments(view: RunView, missing: Missing) -> Iterator[Panel]:
    known = [(p.name, dict(p.ran_on.rows())) for p in view.started if p.ran_on and p.ran_on.rows()]
    if not known:
        missing.note("Versions and devices were not recorded.")
        return
    labels = dict.fromkeys(label for _, rows in known for label in rows)
    rows = [[label, *(one.get(label, "") for _, one in known)] for label in labels]
    head = ["", *(f"phase {name}" for name, _ in known)]
    yield Panel("Environment", ["Of each phase's last steps."], table=Table(rows, head))


def _lineage(nodes: Sequence[Node], missing: Missing) -> Iterator[Panel]:
    if not nodes:
        missing.note("No folder of the run is here, so there is no lineage.")
        return
    text = "`zerotrain trace` verifies every hash from the weights back to the images."
    yield Panel("Lineage", [text], table=lineage_table(nodes), shown=False)
