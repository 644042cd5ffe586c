"""Links in folders from others: where they lead, before a file is read or written through one."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from zerotrain.artifact.layout import DATA, RESULTS
from zerotrain.errors import PipelineError

BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
BASE = "base"
"""The folder of a run or dataset that consists of links to its model."""


def check_links(folder: Path, name: str, kind: str) -> None:
    """Check that a listed file is in its folder after links are resolved.

    A base consists of links to the files of a model, which must keep their suffix: a weights or
    JSON file is never a link to another kind. Files in the hub's cache are named by their content,
    so only someone who has a file can name it there.

    Args:
        folder: The published folder.
        name: The file's name in it.
        kind: The folder's kind.

    Raises:
        PipelineError: a link leads to another place.
    """
    path = folder / name
    target = Path(os.path.realpath(path))
    if target.is_relative_to(os.path.realpath(folder)) or is_hub_blob(target):
        return
    if kind == BASE and target.suffix and target.suffix == path.suffix:
        return
    raise PipelineError(
        f"{path}: a link that leads out of the folder, to {target}",
        hint="files of a published folder are in it: build the folder again, or copy the file in "
        "the link's place if you know who made the link",
    )


def is_hub_blob(path: Path) -> bool:
    """Return whether a resolved path is a file in the hub's cache, named by its content."""
    at_hub = path.parent.name == "blobs" and path.parents[1].name.startswith("models--")
    return at_hub and BLOB.fullmatch(path.name) is not None


def check_run_links(*runs: str, data: str | None = None) -> None:
    """Check that nothing in a run's folder leads out of it, before jobs write there.

    Jobs, Snakemake and trackers append to files and fill folders by name; with a link in the place
    of one, a run from somebody else would have them write anywhere. The folder of the run itself
    may be a link, as to a larger disk.

    Args:
        runs: Names of runs.
        data: The name of a dataset, whose folder is checked as well.

    Raises:
        PipelineError: a link leads out of the folder, or a pipe, a socket or a device is in it.
    """
    folders = [RESULTS / run for run in runs] + ([RESULTS / DATA / data] if data else [])
    for folder in folders:
        inside = os.path.realpath(folder)
        for path in _special_entries(folder):
            if not path.is_symlink():
                raise PipelineError(
                    f"{path}: is a pipe, a socket or a device; a run has only files and folders",
                    hint="remove it; do not use a run if you do not know who made it",
                )
            if not Path(os.path.realpath(path)).is_relative_to(inside):
                raise _leads_out(path, folder)


def check_no_link_above(path: Path) -> None:
    """Check that no folder of a run above a path is a link, before it is written.

    Raises:
        PipelineError: one is.
    """
    parts = Path(os.path.relpath(path)).parts
    if parts[:1] != RESULTS.parts:
        return
    first = 4 if parts[1:2] == (DATA,) else 3  # the folder of a run or dataset may be a link
    for end in range(first, len(parts)):
        folder = Path(*parts[:end])
        if folder.is_symlink():
            raise _leads_out(folder, Path(*parts[: first - 1]))


def _leads_out(link: Path, folder: Path) -> PipelineError:
    return PipelineError(
        f"{link}: a link that leads out of {folder}, to {os.path.realpath(link)}: what is written "
        "there would be outside",
        hint="remove the link, or copy what it names in its place if you know who made it; "
        f"{folder} itself may be a link",
    )


def _special_entries(folder: Path) -> Iterator[Path]:
    """Yield what is neither a file nor a folder, outside of base/."""
    try:
        entries = [*os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_symlink():
            yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False):
            if entry.name != BASE or folder.parent not in (RESULTS, RESULTS / DATA):
                yield from _special_entries(Path(entry.path))
        elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            yield Path(entry.path)
