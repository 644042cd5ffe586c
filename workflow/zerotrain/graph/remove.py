"""`zerotrain remove`: what goes with a run, what stays since others use it, and the removal.

Users are configurations by their values, folders by their parents, and links. A configuration
counts as its file has it, whether or not it would be accepted: a run with a value that is wrong
today has its results still."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import read_text
from zerotrain.artifact.layout import CONFIGS, DATA, RESULTS, ROLLING, DataFolder, RunFolder
from zerotrain.artifact.leftovers import REMOVED, is_held, without_writers
from zerotrain.config.read import load_config
from zerotrain.config.runs import KEY, listed_files, train_command
from zerotrain.config.suggestions import after_question, join_first
from zerotrain.errors import PipelineError
from zerotrain.graph.dvc.files import recorded_below
from zerotrain.graph.snakemake import LOCKS
from zerotrain.graph.switch.command import is_switching
from zerotrain.machine.disk import size
from zerotrain.machine.output import confirm
from zerotrain.run.lineage.chain import ArtifactIndex, enclosing
from zerotrain.run.runs import run_named, runs_here
from zerotrain.training.process.lock import LOCK, check_not_locked

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
    name, given = run_named(run).run, read_configurations()
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


def remove(run: str, *, data: bool, yes: bool) -> list[str]:
    """Remove the results of a run that nothing else uses.

    Args:
        run: Its name, its configuration, or its folder.
        data: Whether its dataset and caches go as well, unless others use them.
        yes: Whether to remove them without a question.

    Returns:
        What was removed, and what stays.

    Raises:
        PipelineError: nothing of such a run is here, something of it is in use or behind a link, or
            no one has confirmed; nothing is removed.
    """
    plan = plan_removal(run, data=data)
    check_unused(plan)
    freed, goes, stays = size(plan.freed), [*plan.lines()], [*_stays(plan)]
    if not yes:
        unanswered = PipelineError(
            f"{plan.run}: not removed without confirmation, and no one can answer: "
            + "; ".join(goes),
            hint="if that may go, call this again with --yes",
        )
        context = "\n".join(["removed would be", *_indented(goes), *_listed("it stays", stays)])
        if not confirm(context, f"Remove {freed} of {plan.run}?", unanswered):
            raise PipelineError(f"{plan.run}: nothing was removed", hint="answer y to remove it")
    with contextlib.ExitStack() as held:
        # One lock is of all caches of a dataset, as they are neighbours.
        caches = {path.parent: path for one in plan.removed for path in one.glob("cache/*")}
        for cache in caches.values():
            if not held.enter_context(without_writers(cache)):
                raise _in_use(cache, "a job writes here or next to it")
        check_unused(plan)
        _remove(plan.removed)
    return [f"{plan.run}: removed {freed}", *_indented(goes), *_listed("it stays", stays)]


def check_unused(plan: Plan) -> None:
    """Check that no process works on the run, or reads what would go.

    Raises:
        PipelineError: one does; the message names it.
    """
    folder = RunFolder(plan.run).path
    for path in sorted(folder.glob(f"*/{ROLLING}/{LOCK}")):
        check_not_locked(path.parent)
    if is_switching(plan.run):
        raise _in_use(folder, "`zerotrain switch` works on it")
    places = [folder, *plan.removed]
    for lock in sorted(LOCKS.glob("*.lock")):
        for line in read_text(lock).splitlines():
            if any(Path(line).is_relative_to(place) for place in places):
                raise _in_use(folder, f"snakemake works on {line}, or was killed")
    for published in plan.published:
        if is_held(published):
            raise _in_use(published, "a process reads it")


def _in_use(folder: Path, why: str) -> PipelineError:
    return PipelineError(
        f"{folder}: in use, and nothing is removed: {why}",
        hint="wait for it, or end it; after a kill of snakemake: `snakemake --unlock`",
    )


def _remove(places: Iterable[Path]) -> None:
    """Rename all, which takes a moment, then remove them: nothing counts as there by half."""
    hidden = []
    for place in places:
        if place.is_symlink() or not place.is_dir():
            place.unlink()
            continue
        aside = place
        if not place.name.endswith(REMOVED):
            aside = place.with_name(f".{place.name}{REMOVED}")
            if aside.exists():
                shutil.rmtree(aside)
            place.rename(aside)
        hidden.append(aside)
    for aside in hidden:
        if aside.exists():
            shutil.rmtree(aside)


def _stays(plan: Plan) -> Iterator[str]:
    yield from (f"{place}: {why}" for place, why in plan.kept.items())
    for file in plan.configurations:
        yield f"{file}: `{train_command(file)}` makes the run again"
    try:
        count, stored = recorded_below(plan.removed)
    except PipelineError as error:
        yield f"copies in DVC's cache, if any: {error.what}"
        return
    if count:
        yield (
            f"{size(stored)} of {count} outputs, as dvc.lock lists them: DVC's cache keeps what it "
            "has of them on the disk, and `zerotrain restore` brings that back; docs/remotes.md "
            "says how to free it"
        )


def _listed(heading: str, lines: list[str]) -> list[str]:
    return [heading, *_indented(lines)] if lines else []


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
