"""The table of processes of this machine: who runs here, what started whom, and their end."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

KILL_SECONDS = 30.0
"""How long killed processes are waited for."""


@dataclass(frozen=True)
class Found:
    """A process of this machine, as the table had it."""

    pid: int
    started: float
    """Seconds since the epoch."""
    words: tuple[str, ...]
    """Its command line."""

    def is_running(self) -> bool:
        """Return whether it still runs; another process may have its pid."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            same = process.create_time() == self.started
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False


def find_processes(folder: str) -> Iterator[Found]:
    """Yield the processes whose working directory is a folder, of those that this user may see."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.cwd() == folder:
                yield _find(process)


def find_parents(pid: int) -> Iterator[Found]:
    """Yield the processes above a process, the nearest first."""
    with suppress(psutil.Error):
        for process in psutil.Process(pid).parents():
            yield _find(process)


def _find(process: psutil.Process) -> Found:
    return Found(process.pid, process.create_time(), tuple(process.cmdline()))


def is_snakemake(words: Sequence[str]) -> bool:
    """Return whether a command line is Snakemake's, called as a program, a script or a module."""
    if not words or not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        return bool(words) and Path(words[0]).name == "snakemake"
    rest = iter(words[1:])
    for word in rest:
        if word in ("-W", "-X"):
            next(rest, None)
        elif word == "-m":
            return next(rest, None) == "snakemake"
        elif word == "-c" or not word.startswith("-"):
            return Path(word).name == "snakemake"
    return False


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used; 0 if it has ended."""
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def started_before(pid: int, age: float) -> bool:
    """Return whether a process runs and is older than `age` seconds."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        old = time.time() - process.create_time() >= age
        return old and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a child process that runs, with all that it started, and wait for their end."""
    if process.poll() is not None:
        return
    found = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in found:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(found, timeout=KILL_SECONDS)
