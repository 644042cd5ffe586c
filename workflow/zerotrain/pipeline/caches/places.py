"""The caches that a command is about, and the runs that train on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zerotrain.artifact import is_published
from zerotrain.artifact.layout import DATA, RESULTS, DataFolder, runs_here
from zerotrain.cache.layout import INDEX
from zerotrain.cache.writer import ORPHANS, PARTIAL
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import read_runs
from zerotrain.errors import PipelineError


def find_caches(folder: Path | None, config: Path | None) -> list[Path]:
    """List the cache folders to look at: one, those of a configuration, or all of the project.

    Raises:
        PipelineError: both are named, the folder is no cache, or nothing is found.
    """
    if folder is not None and config is not None:
        raise PipelineError(
            f"{folder} and --config {config}: one of them names the caches", hint="leave out one"
        )
    if folder is not None:
        if not is_cache(folder):
            raise PipelineError(
                f"{folder}: no cache", hint="name a folder such as results/data/NAME/cache/SIZE"
            )
        return [folder]
    if config is not None:
        runs = read_runs(config).values()
        wanted = dict.fromkeys(place for run in runs for place in places_of(run))
        found = [place for place in wanted if is_cache(place)]
        where = ", ".join(map(str, wanted))
    else:
        found = sorted(filter(is_cache, (RESULTS / DATA).glob("*/cache/*")))
        where = str(RESULTS / DATA / "*" / "cache")
    if not found:
        raise PipelineError(
            f"no cache at {where}", hint="`snakemake --cores all cache` makes the caches of a run"
        )
    return found


def is_cache(folder: Path) -> bool:
    """Return whether a folder is a cache, or the start of one."""
    if folder.name.startswith("."):
        return False
    if is_published(folder) or (folder / INDEX).is_file():
        return (folder / INDEX).is_file()
    return any((folder / name).is_dir() for name in (PARTIAL, ORPHANS))


def places_of(run: RunConfig) -> dict[Path, list[str]]:
    """Return the cache folders of a run, with the phases that train on each."""
    found: dict[Path, list[str]] = {}
    for phase in run.phases:
        place = DataFolder(run.data_name).cache(run.cache_size(phase))
        found.setdefault(place, []).append(phase.name)
    return found


def users_of(folder: Path) -> Iterator[str]:
    """Yield the runs of config/ that train on a cache, with their phases; and unreadable files."""
    here = Path(os.path.relpath(folder))
    for file, name in runs_here().items():
        if name is None:
            continue
        try:
            run = read_config(file)
        except PipelineError:
            yield f"{file}: cannot be read (`zerotrain check {file}` says why)"
            continue
        if phases := places_of(run).get(here):
            yield f"{run.run} ({', '.join(phases)})"
