"""Records of every Snakemake that runs in this project, to remove the lock of a killed one.

Snakemake's lock, .snakemake/locks, contains paths but no process: it stays after a kill -9 and
blocks every later call. So each Snakemake records its process here before it locks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from zerotrain.artifact.documents import check_type, read_object
from zerotrain.machine.child_process import SUPERVISOR, end_with_parent, supervisor_pid
from zerotrain.machine.liveness import hold, is_held, pid_space
from zerotrain.machine.output import print_message
from zerotrain.machine.regular_file import open_to_change, write_text
from zerotrain.training.process.lock_owner import LockOwner, this_process

RUNS = Path(".snakemake/runs")
LOCKS = Path(".snakemake/locks")
MARK = "ZEROTRAIN_SNAKEMAKE"
"""Environment variable that identifies a job's Snakemake, even after that has ended."""
HELD: list[IO[str]] = []
"""This process's records, kept open to hold their locks."""
ORPHAN_SECONDS = 15.0
"""Seconds that a Snakemake may take to notice that its calling command was killed, and to end."""


@dataclass(frozen=True)
class Run:
    """A Snakemake that is running here, or was killed."""

    file: Path
    process: LockOwner
    local: bool
    """Whether its jobs are its child processes; jobs on a cluster outlive it."""
    supervisor: int
    """The pid of the zerotrain command that called it; 0 if none did."""

    def write(self) -> None:
        """Write the record atomically."""
        values = {"process": asdict(self.process), "local": self.local}
        draft = self.file.with_suffix(".new")
        write_text(draft, json.dumps({**values, "supervisor": self.supervisor}))
        draft.replace(self.file)

    def hold(self) -> None:
        """Lock the record while this process lives, as a changed clock affects its start time."""
        with contextlib.suppress(OSError):
            HELD.append(hold(self.file))

    def is_live(self) -> bool:
        """Return whether its process lives, by its record or by the record's lock."""
        found = self.process.is_running()
        if found or (found is None and self.process.host != socket.gethostname()):
            return True
        held = is_held(self.file)
        return found is None if held is None else held


def begin(words: Sequence[str]) -> None:
    """Record this Snakemake until it ends, and remove the locks of killed ones.

    Args:
        words: Its arguments: a dry run locks nothing.
    """
    if is_dry_run(words):
        return
    supervisor = supervisor_pid()
    if supervisor != os.getppid():
        supervisor = 0
    else:
        end_with_parent()  # otherwise it would publish for a command that has ended
    # Its jobs have this Snakemake above them, and those of a cluster get its environment.
    os.environ.pop(SUPERVISOR, None)
    me = this_process()
    run = Run(RUNS / f"{pid_space()}-{me.pid}.json", me, local=True, supervisor=supervisor)
    os.environ[MARK] = run.file.stem
    with contextlib.suppress(OSError):  # if the folder is not writable, Snakemake reports it
        with _turn():
            _clear()
            run.write()
            run.hold()
        atexit.register(_end, run)


def remove_stale_lock() -> None:
    """Remove the lock of killed Snakemakes, as the next Snakemake would."""
    with contextlib.suppress(OSError), _turn():
        _clear()


def note_executor(*, local: bool) -> None:
    """Record where this Snakemake's jobs run, before the first of them."""
    me = this_process()
    with contextlib.suppress(OSError):
        for run in read_runs():
            process = run.process
            if process == me and run.local != local:
                noted = replace(run, local=local)
                noted.write()
                noted.hold()


def read_runs() -> list[Run]:
    """Read all records; a killed process leaves its record."""
    found = []
    for file in sorted(RUNS.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            raw = read_object(file)
            process = check_type(raw["process"], LockOwner, file)
            found.append(Run(file, process, bool(raw["local"]), int(raw["supervisor"])))
    return found


def wait_for_orphans() -> None:
    """Wait until no Snakemake runs here whose calling command was killed: it notices, and ends."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while time.monotonic() < deadline and any(
        run.supervisor
        and run.process.is_running_here()
        and not Path(f"/proc/{run.supervisor}").exists()
        for run in read_runs()
    ):
        time.sleep(0.1)


def is_dry_run(words: Sequence[str]) -> bool:
    """Return whether Snakemake's arguments request a dry run."""
    return any(re.fullmatch(r"--dry-?run|-[Ffkpt]*n[Ffkpqt]*", word) for word in words)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Give access to the records to one process at a time."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with open_to_change(RUNS / "turn", make=True) as turn:
        with contextlib.suppress(OSError):  # no such lock on this file system
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def _clear() -> None:
    """Remove the locks of killed Snakemakes, if no live one could hold them."""
    locks = sorted(LOCKS.glob("*.lock"))
    runs = read_runs()
    living = [run for run in runs if run.is_live()]
    dead = [run for run in runs if run not in living]
    if locks:
        for run in living:
            if run.process.is_running_here() is None:
                print_message(
                    f"{LOCKS}: not unlocked: snakemake {_who(run)} counts as running; if that host "
                    f"is gone for good, remove {run.file}"
                )
        here = [run for run in living if run.process.is_running_here() is not None]
        if here and dead:
            print_message(
                f"{LOCKS}: not unlocked: snakemake {_who(dead[0])} was killed, and snakemake "
                f"{_who(here[0])} works here: wait until it has ended"
            )
        if living or not dead:
            return
        submitted = [run for run in dead if not run.local]
        if submitted:
            print_message(
                f"{LOCKS}: not unlocked: snakemake {_who(submitted[0])} was killed, and its jobs "
                "may run on in the cluster: wait for them or end them, then call `snakemake "
                "--unlock`"
            )
            return
        for run in dead:
            for pid, stage in _jobs_of(run):
                print_message(
                    f"{LOCKS}: not unlocked: snakemake {_who(run)} was killed, and its job {stage} "
                    f"(pid {pid}) runs on: wait until it has ended, or end it"
                )
                return
        for lock in locks:
            lock.unlink(missing_ok=True)
        killed = "; ".join(_who(run) for run in dead)
        print_message(f"{LOCKS}: unlocked: the snakemake that held it was killed ({killed})")
    for run in dead:
        run.file.unlink(missing_ok=True)


def _jobs_of(run: Run) -> Iterator[tuple[int, str]]:
    """Yield the jobs that outlive their Snakemake: pid and stage.

    Trainings are excluded: they have a lock, and run for hours.
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
    if os.getpid() == run.process.pid:  # a fork may end in the same way
        run.file.unlink(missing_ok=True)
