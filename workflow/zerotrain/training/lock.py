"""One writer per progress folder: a lock file that names its holder.

Two locks stand behind each other. The first names its holder, the small process that starts a
training; a dead holder's is taken over. The second is the kernel's, held by the process that writes
checkpoints, and ends with it: it covers the moment in which a killed holder's training still ends.

Launchers look at the lock as well: where it is not their starter's any more, they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from zerotrain.errors import PipelineError
from zerotrain.training.holder import Holder, this_process

LOCK = "lock"
TAKING = "lock.taking"
WRITER = "lock.writer"
LOOK_SECONDS = 1.0
"""How often a launcher looks whether its starter still holds the lock."""
GRACE_SECONDS = 15.0
"""How long the training of a dead holder may take to notice that it is alone, and end."""


class Lock:
    """A held lock. Use `take`, then `release`."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        self._path = folder / LOCK
        self.holder = holder
        _HELD.append(self)

    def release(self) -> None:
        """Give the lock back, unless somebody removed it and another took it since."""
        if holder_of(self._path.parent) == self.holder:
            self._path.unlink(missing_ok=True)
        if self in _HELD:
            _HELD.remove(self)


_HELD: list[Lock] = []


def release_all() -> None:
    """Give back what this process holds, where it ends without unwinding its stack."""
    for lock in list(_HELD):
        with contextlib.suppress(OSError):
            lock.release()


def refuse_taken_over(folder: Path) -> None:
    """Refuse to speak of a training that another one has taken over from this process.

    Raises:
        PipelineError: the message names the other's process and job.
    """
    holder = holder_of(folder)
    if holder is not None and all(holder != held.holder for held in _HELD):
        raise PipelineError(
            f"{folder}: another training has taken over: pid {holder.pid} on {holder.host}"
            f"{holder.details}; this one was ended",
            hint="wait for the other, which goes on from the newest checkpoint",
        )


def take(folder: Path, refuse: Callable[[Path], Holder | None] | None = None) -> Lock:
    """Take the lock of a folder.

    Args:
        folder: A progress folder, or another one where one process may work at a time.
        refuse: Raises where a process that lives holds the lock, else returns its holder; default:
            `refuse_held`.

    Raises:
        PipelineError: another process holds it; the message names host, pid and since when.
    """
    folder.mkdir(parents=True, exist_ok=True)
    me = this_process()
    # A new file each time: an old one of this name may be the lock itself under its first name.
    draft = folder / f"{LOCK}.new-{me.host}-{me.pid}"
    draft.unlink(missing_ok=True)
    draft.write_text(json.dumps(asdict(me)))
    try:
        # Takers go one by one, else a second could clear away what the first has just taken over.
        with (folder / TAKING).open("w") as turn:
            with contextlib.suppress(OSError):  # a file system without this lock
                fcntl.flock(turn, fcntl.LOCK_EX)
            while True:
                _clear_if_dead(folder, draft.with_suffix(".dead"), refuse or refuse_held)
                try:
                    # A hard link appears with its content and fails where one exists: no moment
                    # between the two.
                    os.link(draft, folder / LOCK)
                except FileExistsError:
                    continue
                except OSError:  # a file system without hard links
                    draft.replace(folder / LOCK)
                return Lock(folder, me)
    finally:
        draft.unlink(missing_ok=True)


def holder_of(folder: Path) -> Holder | None:
    """Who holds the lock of a progress folder, alive or not; None if nobody does."""
    return _read(folder / LOCK)


def _read(lock: Path) -> Holder | None:
    try:
        return Holder(**json.loads(lock.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return None  # a lock appears whole: what is not came out of a power cut


def _clear_if_dead(folder: Path, aside: Path, refuse: Callable[[Path], Holder | None]) -> None:
    """Remove a dead holder's lock, and no other: without flock another taker may have been here."""
    dead = refuse(folder)
    try:
        (folder / LOCK).rename(aside)
    except FileNotFoundError:
        return
    if _read(aside) != dead:
        with contextlib.suppress(OSError):
            os.link(aside, folder / LOCK)
    aside.unlink()


def refuse_held(folder: Path) -> Holder | None:
    """Refuse a progress folder in which a training runs.

    Returns:
        The holder of the lock, who runs no more; None if nobody holds it.

    Raises:
        PipelineError: the message names its process and job, and how to stop it.
    """
    holder = holder_of(folder)
    if holder is None or not holder.lives():
        return holder
    end_it = f" or `scancel {holder.job}`" if holder.job else ""
    raise PipelineError(
        f"{folder}: a training is running here already: pid {holder.pid} on {holder.host}"
        f"{holder.details}",
        hint=f"wait for it, or stop it with `touch {folder}/stop`{end_it}; if that host is gone "
        f"for good, remove {folder}/{LOCK}",
    )


def end_with_holder(folder: Path) -> None:
    """End this process group once the lock is not what it is now, or its holder of this host ends.

    For launchers: of several machines' the starter is on one of them, where a signal that nobody
    can answer ends it alone. And a machine that its cluster has given up for lost may run: what is
    started elsewhere since holds the lock.
    """
    first = holder_of(folder)

    def gone() -> bool:
        nonlocal first
        try:
            now = holder_of(folder)
        except OSError:  # a shared folder that does not answer now
            return False
        first = first or now  # what is new in a network's folder may be seen late
        return now != first or (now is not None and now.runs_here() is False)

    def watch() -> None:
        times = 0
        while times < 2:  # a network's file system may miss a file for a moment
            time.sleep(LOOK_SECONDS)
            times = times + 1 if gone() else 0
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lock", daemon=True).start()


def hold_writer(folder: Path) -> IO[str]:
    """Take the kernel's lock of the writing process; it lasts while the returned file is open.

    Raises:
        PipelineError: the writer of an earlier start does not end.
    """
    stream = (folder / WRITER).open("w")
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stream
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                stream.close()
                raise PipelineError(
                    f"{folder}: a training process of an earlier start still runs",
                    hint=f"find it with `fuser {folder / WRITER}`, end it, and start again",
                ) from error
            time.sleep(0.1)
        except OSError:
            return stream  # a file system without this lock: the first one has to do
