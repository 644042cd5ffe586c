"""What a killed writer leaves beside a folder, and its mending."""

from __future__ import annotations

import contextlib
import glob
import shutil
from pathlib import Path

import psutil


def mend(folder: Path) -> None:
    """Clear what a killed writer left beside the folder: the old one comes back, the new goes."""
    if not folder.parent.is_dir():
        return
    name = glob.escape(folder.name)
    for old in folder.parent.glob(f".{name}.old-*"):
        if _writer_lives(old):
            continue
        # Two readers may mend at once, and one that may only read cannot: then it stays.
        with contextlib.suppress(OSError):
            folder.rmdir()  # an empty folder, as Snakemake makes before a job
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                old.rename(folder)
    for new in folder.parent.glob(f".{name}.new-*"):
        if _writer_lives(new):
            continue
        if new.is_dir():
            shutil.rmtree(new, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                new.unlink()


def _writer_lives(leftover: Path) -> bool:
    """Whether the process whose pid ends the name wrote it: a later one of that pid did not."""
    pid = leftover.name.rpartition("-")[2]
    try:
        process = psutil.Process(int(pid))
        ended = process.status() == psutil.STATUS_ZOMBIE
        # Clocks of file servers differ, and boot time is read in whole seconds: 5 are allowed for.
        return not ended and process.create_time() <= leftover.lstat().st_ctime + 5
    except (ValueError, psutil.NoSuchProcess, FileNotFoundError):
        return False
