"""Who uses what below results/: configurations by their values, folders by their parents, links.

A configuration counts as its file has it, whether or not it would be accepted: a run with a value
that is wrong today has its results still.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zerotrain.artifact import Artifact
from zerotrain.artifact.layout import CONFIGS, DATA, RESULTS, DataFolder, RunFolder
from zerotrain.config.read import load_config
from zerotrain.config.runs import KEY, listed_files
from zerotrain.errors import PipelineError

Uses = dict[Path, list[str]]
"""Users of each place below results/; the place is a folder or in one."""


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
