"""Lock file of a progress folder: it names its owner and allows one writer at a time.

There are two locks. The first is a file that names its owner, the small process that starts a
training; the lock of a dead owner is taken over. If the owner is in another container or on
another machine, its lease decides whether it is alive (zerotrain.training.process.lock_file). The
second is a kernel lock (flock) held by the process that writes checkpoints, and it ends with that
process: it covers the moment in which the training of a killed owner is still ending.

Launchers also watch the lock: they end once the process that started them no longer holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from zerotrain.artifact.documents import read_record
from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import writing
from zerotrain.machine.file_lock import lock_stream, one_at_a_time
from zerotrain.machine.output import print_message
from zerotrain.machine.pid_space import pid_space
from zerotrain.machine.processes import ProcessRecord, this_process
from zerotrain.machine.regular_file import open_to_change, write_text
from zerotrain.training.process.lock_file import (
    LEASE_SECONDS,
    SignsOfLife,
    give_name,
    last_sign,
    sign_seconds,
    silent_seconds,
)

LOCK = "lock"
TAKING = "lock.taking"
WRITER = "lock.writer"
LOOK_SECONDS = 1.0
"""Interval at which a launcher checks whether its starter still holds the lock."""
GRACE_SECONDS = 15.0
"""Time that the training of a dead owner gets to notice that it is alone and to end."""
TORN_SECONDS = 5.0
"""Age up to which an empty lock may still be being written, on a disk without hard links."""


class Lock:
    """Held lock that gives signs of life. Use `take`, then `release`."""

    def __init__(self, folder: Path, owner: ProcessRecord) -> None:
        self._path = folder / LOCK
        self.owner = owner
        self._signs = SignsOfLife(self._path, owner.lease)
        _HELD.append(self)

    def release(self) -> None:
        """Release the lock, unless it was removed and another process has taken it since."""
        self._signs.close()
        if read_owner(self._path.parent) == self.owner:
            self._path.unlink(missing_ok=True)
        if self in _HELD:
            _HELD.remove(self)


_HELD: list[Lock] = []


def release_all() -> None:
    """Release all locks of this process, if it ends without unwinding its stack."""
    for lock in list(_HELD):
        with contextlib.suppress(OSError):
            lock.release()


def check_not_taken_over(folder: Path) -> None:
    """Raise an error if another training has taken the lock over from this process.

    Raises:
        PipelineError: another process holds the lock; the message names its process and job.
    """
    owner = read_owner(folder)
    if owner is not None and all(owner != held.owner for held in _HELD):
        raise PipelineError(
            f"{folder}: another training has taken over: pid {owner.pid} on {owner.host}"
            f"{owner.details}; this one was ended",
            hint="wait for the other, which continues from the newest checkpoint",
        )


def take(
    folder: Path,
    seconds: float = LEASE_SECONDS,
) -> Lock:
    """Take the lock of a folder.

    If only a lease shows whether the current owner is alive, wait for its next sign of life or for
    the end of the lease.

    Args:
        folder: A progress folder.
        seconds: The lease: how long this process may go without a sign of life.

    Raises:
        PipelineError: another process holds the lock; the message names host, pid and start time.
        DiskError: the lock cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    me = this_process(seconds)
    wait_for_sign(folder)
    # A new file each time: an old file of this name may be the current lock under its first name.
    draft = folder / f"{LOCK}.new-{pid_space()}-{me.pid}"
    try:
        with writing(folder):
            write_text(draft, json.dumps(asdict(me)))
        # One at a time: a second could remove a lock that was just taken over.
        with one_at_a_time(folder / TAKING):
            while True:
                _clear_if_dead(folder, draft.with_suffix(".dead"))
                try:
                    give_name(draft, folder / LOCK)
                except FileExistsError:
                    continue
                return Lock(folder, me)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def is_alive(folder: Path, owner: ProcessRecord) -> bool:
    """Return whether the owner of a folder's lock runs, as far as is known without waiting.

    If neither its pid nor Slurm shows it, its lease decides; without a lease it counts as alive.
    """
    running = owner.is_running()
    return not _is_expired(folder, owner) if running is None else running


def _is_expired(folder: Path, owner: ProcessRecord) -> bool:
    """Return whether an owner of unknown state has been silent for longer than its lease."""
    silent = _silent(folder / LOCK)
    return owner.ended_before_boot(silent) or 0 < owner.lease < silent


def wait_for_sign(folder: Path, end: float | None = None) -> bool:
    """Wait for a sign of life of the owner, if nothing else shows whether it is alive.

    An expired lease is not enough: a disk that did not respond for a while may have delayed the
    signs.

    Args:
        folder: The folder of the lock.
        end: Seconds after which the wait ends in any case; default: the end of the lease.

    Returns:
        Whether it gave a sign.
    """
    owner, path = read_owner(folder), folder / LOCK
    if owner is None or not owner.lease or (end is None and owner.is_running() is not None):
        return False
    first, start = last_sign(path), time.monotonic()
    every, announced = sign_seconds(owner.lease), False
    least = 2 * every if end is None else end
    while read_owner(folder) == owner and not owner.ended_before_boot(_silent(path)):
        if last_sign(path) not in (first, None):
            return True
        waited = time.monotonic() - start
        if waited > least and (end is not None or _is_expired(folder, owner)):
            return False
        if not announced and waited > every / 2:
            announced = True
            print_message(f"{folder}: waiting for a sign of life of {describe(folder, owner)}")
        time.sleep(min(LOOK_SECONDS, every / 2))
    return False


def describe(folder: Path, owner: ProcessRecord) -> str:
    """Describe the owner of a folder's lock: process, host, job, start time, last sign of life."""
    sign = ""
    if owner.lease and owner.is_running_here() is None:
        sign = f", last sign of life {_silent(folder / LOCK):.0f} s ago"
    return f"pid {owner.pid} on {owner.host}{owner.details}{sign}"


def _silent(path: Path) -> float:
    with contextlib.suppress(OSError):  # not writable, so no process can take the lock over
        return silent_seconds(path)
    return 0.0


def read_owner(folder: Path) -> ProcessRecord | None:
    """Return the owner of a folder's lock, alive or not; None without a readable lock."""
    return _read(folder / LOCK)


def _read(lock: Path) -> ProcessRecord | None:
    try:
        return read_record(lock, ProcessRecord)
    except PipelineError:
        return None  # no file, or after a power cut, or still being written: TORN_SECONDS


def _clear_if_dead(folder: Path, aside: Path) -> None:
    """Remove a dead owner's lock.

    Raises:
        FileError: a link, a folder or a pipe is in its place.
    """
    while (dead := check_not_locked(folder)) is None and last_sign(folder / LOCK) is not None:
        if _silent(folder / LOCK) > TORN_SECONDS:
            break
        time.sleep(0.1)
    _remove(folder, aside, dead)


def remove(folder: Path, owner: ProcessRecord) -> None:
    """Remove the lock if it belongs to this owner."""
    with writing(folder), one_at_a_time(folder / TAKING):
        _remove(folder, folder / f"{LOCK}.removed-{pid_space()}-{os.getpid()}", owner)


def _remove(folder: Path, aside: Path, owner: ProcessRecord | None) -> None:
    """Remove the lock if it is this owner's: without flock another process may have taken it."""
    try:
        (folder / LOCK).rename(aside)
    except FileNotFoundError:
        return
    if _read(aside) != owner:
        with contextlib.suppress(FileExistsError):
            give_name(aside, folder / LOCK)
    aside.unlink()


def check_not_locked(folder: Path) -> ProcessRecord | None:
    """Raise an error if a training runs in a progress folder.

    Returns:
        The owner of the lock, which no longer runs; None if there is no lock.

    Raises:
        PipelineError: a training runs; the message names its process and job, and how to stop it.
    """
    owner = read_owner(folder)
    if owner is None or not is_alive(folder, owner):
        return owner
    end_it = f" or `scancel {owner.job}`" if owner.job else ""
    raise PipelineError(
        f"{folder}: a training is running here already: {describe(folder, owner)}",
        hint=f"wait for it, or stop it with `touch {folder}/stop`{end_it}"
        + unlock_hint(folder, owner),
    )


def unlock_hint(folder: Path, owner: ProcessRecord) -> str:
    """Return the end of a hint: how to remove a lock whose owner is not visible from here."""
    if owner.is_running_here() is not None:
        return ""
    expires = ""
    if owner.lease:
        expires = f"; its lock expires {owner.lease:g} s after its last sign of life"
    known = re.fullmatch(r"results/([^/]+/[^/]+)/progress", folder.as_posix())
    name = known[1] if known else folder
    return f"{expires}; if it is gone for good: `zerotrain progress unlock {name}`"


def end_group() -> None:
    """End this process and its process group."""
    os.killpg(0, signal.SIGKILL)


def end_with_owner(folder: Path, end: Callable[[], None] = end_group) -> Callable[[], None]:
    """End this process group once the lock changes hands, or its owner on this host ends.

    For launchers. If there are several machines, the starter is on one of them, and SIGKILL ends
    only the starter. A machine that its cluster has given up as lost may still run, while a
    training started on another machine holds the lock.

    Args:
        folder: The folder of the lock.
        end: Ends the training; default: kills the process group.

    Returns:
        A function that stops watching, for a process that releases the lock itself.
    """
    first, stopped = read_owner(folder), threading.Event()

    def gone() -> bool:
        nonlocal first
        try:
            now = read_owner(folder)
        except OSError:  # a shared folder that does not respond now
            return False
        first = first or now  # a network file system may show a new file late
        return now != first or (now is not None and now.is_running_here() is False)

    def watch() -> None:
        times = 0
        while times < 2:  # a network file system may miss a file for a moment
            if stopped.wait(LOOK_SECONDS):
                return
            times = times + 1 if gone() else 0
        if not stopped.is_set():
            end()

    threading.Thread(target=watch, name="lock", daemon=True).start()
    return stopped.set


def hold_writer(folder: Path) -> IO[str]:
    """Take the kernel lock of the writing process; it lasts while the returned file is open.

    Raises:
        PipelineError: the writer of an earlier start does not end, or no file has the lock's name.
    """
    stream = open_to_change(folder / WRITER, make=True)
    deadline = time.monotonic() + GRACE_SECONDS
    while lock_stream(stream) is False:
        if time.monotonic() > deadline:
            stream.close()
            raise PipelineError(
                f"{folder}: a training process of an earlier start still runs",
                hint=f"find it with `fuser {folder / WRITER}`, end it, and start again",
            )
        time.sleep(0.1)
    return stream
