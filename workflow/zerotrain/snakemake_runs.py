"""A record of every Snakemake that works in this project, so that a killed one's lock is removed.

Snakemake's own lock, .snakemake/locks, holds paths and names no process: it stays after a kill -9,
and refuses every later call. So each Snakemake writes here who it is, before it locks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from zerotrain.supervise import SUPERVISOR, end_with_parent
from zerotrain.training.holder import Holder, this_process

RUNS = Path(".snakemake/runs")
LOCKS = Path(".snakemake/locks")
MARK = "ZEROTRAIN_SNAKEMAKE"
"""Environment variable by which a job tells whose it is, after the end of its Snakemake, too."""
HELD: list[IO[str]] = []
"""This process's records, kept open for the locks on them."""
ORPHAN_SECONDS = 15.0
"""How long a Snakemake may take to notice that the command above it was killed, and end."""


@dataclass(frozen=True)
class Run:
    """A Snakemake that works here, or was killed."""

    file: Path
    process: Holder
    local: bool
    """Whether its jobs are its own processes; a cluster's live on without it."""
    supervisor: int
    """The pid of the command of ours that called it; 0 if none did."""

    def write(self) -> None:
        """Write the record, so that it appears whole."""
        values = {"process": asdict(self.process), "local": self.local}
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps({**values, "supervisor": self.supervisor}))
        draft.replace(self.file)

    def hold(self) -> None:
        """Lock the record while this process lives, whatever the clock says of its start."""
        stream = self.file.open("r+")
        HELD.append(stream)
        with contextlib.suppress(OSError):  # a file system without this lock
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_live(self) -> bool:
        """Whether its process lives, by what it recorded or by the lock on the record."""
        if self.process.lives():
            return True
        with contextlib.suppress(OSError), self.file.open("r+") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def begin(words: Sequence[str]) -> None:
    """Record this Snakemake until it ends, and remove the lock of those that were killed.

    Args:
        words: Its arguments: a dry run locks nothing.
    """
    if is_dry_run(words):
        return
    supervisor = int(os.environ.get(SUPERVISOR, "0"))
    if supervisor != os.getppid():
        supervisor = 0
    else:
        end_with_parent()  # else it would publish for a command that is not there any more
    me = this_process()
    run = Run(RUNS / f"{me.host}-{me.pid}.json", me, local=True, supervisor=supervisor)
    os.environ[MARK] = run.file.stem
    with contextlib.suppress(OSError):  # where nothing can be written Snakemake says so itself
        with _turn():
            _clear()
            run.write()
            run.hold()
        atexit.register(_end, run)


def remove_stale_lock() -> None:
    """Remove the lock of Snakemakes that were killed, as the next one would."""
    with contextlib.suppress(OSError), _turn():
        _clear()


def note_executor(*, local: bool) -> None:
    """Note where this Snakemake's jobs run, before the first of them."""
    me = this_process()
    with contextlib.suppress(OSError):
        for run in read_runs():
            process = run.process
            if (process.host, process.pid) == (me.host, me.pid) and run.local != local:
                noted = replace(run, local=local)
                noted.write()
                noted.hold()


def read_runs() -> list[Run]:
    """Read all records; those of ended processes are still there where they were killed."""
    found = []
    for file in sorted(RUNS.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            raw = json.loads(file.read_text())
            process = Holder(**raw["process"])
            found.append(Run(file, process, bool(raw["local"]), int(raw["supervisor"])))
    return found


def wait_for_orphans() -> None:
    """Wait until no Snakemake runs here whose command was killed: it notices, and ends."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while time.monotonic() < deadline and any(
        run.supervisor and run.process.runs_here() and not Path(f"/proc/{run.supervisor}").exists()
        for run in read_runs()
    ):
        time.sleep(0.1)


def is_dry_run(words: Sequence[str]) -> bool:
    """Whether Snakemake's arguments ask for a dry run."""
    return any(re.fullmatch(r"--dry-?run|-[Ffkpt]*n[Ffkpqt]*", word) for word in words)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Let one process at a time look at the records."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with (RUNS / "turn").open("w") as turn:
        with contextlib.suppress(OSError):  # a file system without this lock
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def _clear() -> None:
    """Remove the locks that killed Snakemakes left, where none works here that could hold them."""
    locks = sorted(LOCKS.glob("*.lock"))
    runs = read_runs()
    living = [run for run in runs if run.is_live()]
    dead = [run for run in runs if run not in living]
    if locks:
        for run in living:
            if run.process.runs_here() is None:
                _say(
                    f"{LOCKS}: not unlocked: snakemake {_who(run)} counts as running; if that host "
                    f"is gone for good, remove {run.file}"
                )
        here = [run for run in living if run.process.runs_here() is not None]
        if here and dead:
            _say(
                f"{LOCKS}: not unlocked: snakemake {_who(dead[0])} was killed, and snakemake "
                f"{_who(here[0])} works here: wait until it has ended"
            )
        if living or not dead:
            return
        submitted = [run for run in dead if not run.local]
        if submitted:
            _say(
                f"{LOCKS}: not unlocked: snakemake {_who(submitted[0])} was killed, and its jobs "
                "may run on in the cluster: wait for them or end them, then call `snakemake "
                "--unlock`"
            )
            return
        for run in dead:
            for pid, stage in _jobs_of(run):
                _say(
                    f"{LOCKS}: not unlocked: snakemake {_who(run)} was killed, and its job {stage} "
                    f"(pid {pid}) runs on: wait until it has ended, or end it"
                )
                return
        for lock in locks:
            lock.unlink(missing_ok=True)
        killed = "; ".join(_who(run) for run in dead)
        _say(f"{LOCKS}: unlocked: the snakemake that held it was killed ({killed})")
    for run in dead:
        run.file.unlink(missing_ok=True)


def _jobs_of(run: Run) -> Iterator[tuple[int, str]]:
    """Find the jobs that run on after their Snakemake: pid and stage.

    Trainings are left out: they have a lock of their own, and run for hours.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError, IndexError):
            words = process.cmdline()
            stage = words[words.index("--log") + 2]
            if stage != "train_phase" and process.environ().get(MARK) == run.file.stem:
                yield process.pid, stage


def _who(run: Run) -> str:
    return f"pid {run.process.pid} on {run.process.host}{run.process.details}"


def _end(run: Run) -> None:
    if os.getpid() == run.process.pid:  # a fork of it may end in the same way
        run.file.unlink(missing_ok=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
