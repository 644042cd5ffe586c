"""Files that are written whole or not at all: next to their place first, then renamed into it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from zerotrain.artifact.leftovers import beside, mend
from zerotrain.disk_errors import check_no_file, writing


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a temporary file to write, which then takes the place of `path`.

    What was at `path` stays until then, and stays if the block raises; the temporary file goes,
    and so do the folders that were made for it.

    Raises:
        PipelineError: what is above it is a file.
        DiskError: the disk is full, read-only, or fails.
    """
    check_no_file(path.parent)
    new = beside(path, "new")
    with writing(path):
        made = [folder for folder in path.parents if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mend(path)
            yield new
            sync(new)
            new.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()
            raise


def write_whole(path: Path, text: str) -> None:
    """Write a file of text, as UTF-8, whole or not at all.

    Raises:
        DiskError: the disk is full, read-only, or fails; what was at `path` is unchanged.
    """
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def create(path: Path, text: str) -> None:
    """Write a new file of text, as UTF-8, whole or not at all; nothing is overwritten.

    Raises:
        FileExistsError: there is one already.
        DiskError: the disk is full, read-only, or fails.
    """
    with writing(path):
        new = beside(path, "new")
        try:
            new.write_text(text, encoding="utf-8")
            sync(new)
            try:
                os.link(new, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                path.touch(exist_ok=False)
                new.replace(path)
        finally:
            with contextlib.suppress(OSError):
                new.unlink()


def sync(path: Path) -> None:
    """Bring a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
