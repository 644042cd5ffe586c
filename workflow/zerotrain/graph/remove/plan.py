"""What goes with a run, and what stays since others use it.

Users are configurations by their values, folders by their parents, and links. A configuration
counts as its file has it, whether or not it would be accepted: a run with a value that is wrong
today has its results still.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.artifact.layout import CONFIGS, DATA, RESULTS, DataFolder, RunFolder
from zerotrain.artifact.leftovers import REMOVED
from zerotrain.config.read import load_config
from zerotrain.config.runs import KEY, is_file_name, listed_files
from zerotrain.config.suggestions import after_question, join_first
from zerotrain.errors import PipelineError
from zerotrain.machine.disk import size
from zerotrain.run.lineage.index import ArtifactIndex, enclosing
from zerotrain.run.runs import run_named, runs_here

SHOWN = 3
"""Users that are named."""
Uses = dict[Path, list[str]]
"""Users of each place below results/; the place is a folder or in one."""


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
    here = runs_here()
    raise PipelineError(
        f"{RESULTS}: nothing of a run {plan.run}",
        hint=after_question(plan.run, here, f"there are: {', '.join(here) or 'none'}"),
    )


def read_configurations() -> dict[Path, dict[str, Any]]:
    """Read the configuration of each run of config/, those that a sweep lists included.

    Raises:
        PipelineError: a file is no YAML, so that what it uses is not known.
    """
    found = {}
    for file in sorted(CONFIGS.glob("*.yaml")):
        raw = load_config(file)
        if not isinstance(raw, dict):
            continue
        for path in listed_files(raw, file) if KEY in raw else [file]:
            own = load_config(path)
            if isinstance(own, dict) and isinstance(own.get("run"), str):
                found[path] = own
    return found


def data_name(raw: dict[str, Any]) -> str:
    """Return the folder of a configuration's dataset under results/data.

    Raises:
        PipelineError: it names another place, which would be removed with --data.
    """
    data = raw.get("data")
    name = str((data.get("name") if isinstance(data, dict) else None) or raw["run"])
    if Path(name).parts != (name,) or name == "..":
        raise PipelineError(
            f"run {raw['run']}: data.name {name!r} is no name of a folder in {RESULTS / DATA}",
            hint="correct it in the run's configuration, which `zerotrain check` explains",
        )
    return name


def uses_of_configurations(configurations: dict[Path, dict[str, Any]]) -> Uses:
    """Return what configurations use: dataset, caches, their base, and each path that they name."""
    found: Uses = defaultdict(list)
    for file, raw in configurations.items():
        name = data_name(raw)
        places = {DataFolder(name).path, RunFolder(name).base, *_paths(raw)}
        for place in sorted(places):
            found[place].append(f"{raw['run']} ({file})")
    return found


def uses_of_folders(folders: Iterable[Artifact]) -> Uses:
    """Return what published folders were made from, and where the links of bases lead."""
    found: Uses = defaultdict(list)
    for one in folders:
        named = [Path(parent["path"]) for parent in one.parents.values()]
        links = (one.folder / name for name in one.files)
        named += [Path(os.path.realpath(path)) for path in links if path.is_symlink()]
        for place in dict.fromkeys(filter(None, map(_in_results, named))):
            found[place].append(os.path.relpath(one.folder))
    return found


def users_of(folder: Path, uses: Uses) -> list[str]:
    """Return the users of a folder or of anything in it, each once."""
    inside = (users for place, users in uses.items() if place.is_relative_to(folder))
    return list(dict.fromkeys(user for users in inside for user in users))


def _paths(value: Any) -> Iterator[Path]:
    """Yield the places below results/ that texts of a configuration name."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _paths(one)
    elif isinstance(value, str) and RESULTS.name in value:
        # `base` may put several places into one text: REPO:FILES,REPO:FILES.
        for word in value.replace(":", ",").split(","):
            if place := _in_results(Path(word.strip()).expanduser()):
                yield place


def _in_results(path: Path) -> Path | None:
    """Return a path relative to the project if it is below results/."""
    found = Path(os.path.relpath(path))
    return found if found.parts[:1] == RESULTS.parts and len(found.parts) > 1 else None


def check_no_link(folder: Path) -> None:
    """Check that no folder above a place, nor itself, is a link.

    Raises:
        PipelineError: one is.
    """
    for place in reversed([folder, *folder.parents][:-1]):
        if place.is_symlink():
            target = os.path.realpath(place)
            raise PipelineError(
                f"{place}: a link to {target}; nothing is removed through a link",
                hint=f"look at {target}: if nothing else uses it, remove it, then the link",
            )
