"""What goes with a run, and what stays since others use it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zerotrain.artifact.in_use import REMOVED
from zerotrain.artifact.layout import DATA, RESULTS, RunFolder
from zerotrain.config.runs import is_file_name
from zerotrain.config.suggestions import after_question, join_first
from zerotrain.errors import PipelineError
from zerotrain.machine.disk import size
from zerotrain.pipeline.lineage.index import ArtifactIndex, enclosing
from zerotrain.pipeline.remove.uses import (
    check_no_link,
    data_name,
    read_configurations,
    users_of,
    uses_of_configurations,
    uses_of_folders,
)
from zerotrain.run.runs import run_named

SHOWN = 3
"""Users that are named."""


@dataclass
class Plan:
    """What goes with a run.

    Attributes:
        run: Its name.
        configurations: Its files.
        removed: The folders and files that go.
        kept: The folders that stay, each with the reason.
        published: The published folders in what goes.
    """

    run: str
    configurations: list[Path]
    removed: list[Path] = field(default_factory=list)
    kept: dict[Path, str] = field(default_factory=dict)
    published: list[Path] = field(default_factory=list)

    @property
    def freed(self) -> int:
        """Return the bytes that are free afterwards."""
        return freed_bytes(self.removed)

    def lines(self) -> Iterator[str]:
        """Yield what goes, with sizes."""
        for place in self.removed:
            parts = sorted(place.iterdir()) if place == RunFolder(self.run).path else []
            sizes = {part.name: freed_bytes([part]) for part in parts}
            named = [f"{name} {size(count)}" for name, count in sizes.items() if count]
            listed = f" ({', '.join(named)})" if named else ""
            yield f"{place}: {size(freed_bytes([place]))}{listed}"


def plan_removal(run: str, *, data: bool) -> Plan:
    """Find what goes with a run.

    Args:
        run: Its name, its configuration, or its folder.
        data: Whether its dataset and caches go as well, unless others use them.

    Raises:
        PipelineError: nothing of such a run is here, a file does not say what it uses, or what
            would go is behind a link.
    """
    name, given = _name_of(run), read_configurations()
    own = {file: raw for file, raw in given.items() if raw["run"] == name}
    folder, index = RunFolder(name).path, ArtifactIndex(Path())
    published, unread = index.published, index.unreadable
    plan = Plan(name, [*own])
    by_name = uses_of_configurations({file: given[file] for file in given if file not in own})
    inside = uses_of_folders(one for one in published if one.folder.is_relative_to(folder))
    datasets = dict.fromkeys(
        [RESULTS / DATA / data_name(raw) for raw in own.values()]
        + [Path(*place.parts[:3]) for place in inside if place.parts[1:2] == (DATA,)]
    )
    alone = []
    for dataset in filter(Path.is_dir, datasets):
        others = [one for one in published if not _is_in(one.folder, [folder, dataset])]
        users = [*users_of(dataset, by_name), *users_of(dataset, uses_of_folders(others))]
        users += [f"perhaps {one}, whose manifest cannot be read" for one in unread
                  if not _is_in(one, [folder, dataset])]  # fmt: skip
        if users:
            plan.kept[dataset] = f"used by {join_first(users, SHOWN)}"
        else:
            alone.append(dataset)
    rest = uses_of_folders(one for one in published if not _is_in(one.folder, [folder, *alone]))
    used = {place: users for uses in (by_name, rest) for place, users in uses.items()}
    for place in used:
        if place.is_relative_to(folder) and place.exists():
            whole = enclosing(place) or place
            users = users_of(whole, by_name) + users_of(whole, rest)
            plan.kept[whole] = f"used by {join_first(users, SHOWN)}"
    plan.removed = [*_without(folder, plan.kept)] if folder.exists() or folder.is_symlink() else []
    if (left := folder.with_name(f".{name}{REMOVED}")).is_dir():
        plan.removed.append(left)
    if data:
        plan.removed += alone
    else:
        said = "no other run uses it; `--data` removes it, too"
        plan.kept |= {one: f"{size(freed_bytes([one]))}; {said}" for one in alone}
    for place in plan.removed:
        check_no_link(place)
    _check_any(plan, given.values())
    plan.published = [one.folder for one in published if _is_in(one.folder, plan.removed)]
    return plan


def freed_bytes(places: Iterable[Path]) -> int:
    """Return the bytes of files that are gone once the places are: all names of them are inside."""
    names: Counter[tuple[int, int]] = Counter()
    found = {}
    for path in (path for place in places for path in _files(place)):
        entry = path.lstat()
        names[entry.st_dev, entry.st_ino] += 1
        found[entry.st_dev, entry.st_ino] = entry
    return sum(one.st_size for key, one in found.items() if one.st_nlink == names[key])


def _files(place: Path) -> Iterator[Path]:
    if not place.is_dir() or place.is_symlink():
        yield place
    for folder, _, files in os.walk(place):
        yield from (Path(folder, name) for name in files)


def _name_of(run: str) -> str:
    words = Path(run).parts
    if words[:1] == RESULTS.parts:
        words = words[1:]
    elif Path(run).suffix and is_file_name(run):
        return run_named(run)[0]
    if len(words) != 1 or words[0] in (DATA, "..") or words[0].startswith("."):
        raise PipelineError(
            f"{run!r} names no run", hint="name the run, its configuration, or results/RUN"
        )
    return words[0]


def _is_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _without(folder: Path, kept: Iterable[Path]) -> Iterator[Path]:
    """Yield a folder, or what of it is neither kept nor above what is."""
    if folder in kept:
        return
    if not any(place.is_relative_to(folder) for place in kept):
        yield folder
        return
    for entry in sorted(folder.iterdir()):
        yield from _without(entry, kept)


def _check_any(plan: Plan, given: Iterable[dict[str, object]]) -> None:
    if plan.removed:
        return
    if plan.kept:
        stays = "; ".join(f"{place}: {why}" for place, why in plan.kept.items())
        raise PipelineError(
            f"{plan.run}: nothing is removed: {stays}",
            hint="--data includes a dataset of no other run; remove what uses the rest first",
        )
    here = sorted(path.name for path in RESULTS.glob("[!.]*/") if path.name != DATA)
    raise PipelineError(
        f"{RESULTS}: nothing of a run {plan.run}",
        hint=after_question(plan.run, here, f"there are: {', '.join(here) or 'none'}"),
    )
