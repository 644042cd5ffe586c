"""A copy of the cache on a machine's local disk, which all training processes there read.

<launch.scratch>/zerotrain-cache-<user>-<host>-<identity>/
    lock     held shared by each training that reads the copy, exclusively by one that makes or
             removes it; the kernel releases the lock of a killed one
    cache/   the copy, which exists only when complete
    new/     the copy while it is being made

The copy saves time and changes no number. So any obstacle only gives a message, and the training
reads the shared folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, Artifact
from zerotrain.errors import PipelineError
from zerotrain.machine import disk
from zerotrain.machine.regular_file import open_new, open_to_change, open_to_read

PREFIX = "zerotrain-cache-"
LOCK, COPY, NEW = "lock", "cache", "new"
CHUNK = 2**23
POLL_SECONDS = 0.2
TRIES = 3
"""Another training may remove a copy before its maker reads it; a bad disk never keeps one."""


class _NoCopyError(Exception):
    """Reason why there is no copy."""


@contextlib.contextmanager
def copy_of_cache(
    scratch: str, cache: Path, stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Path, str]]:
    """Yield the folder from which this machine's processes read the cache, and a message about it.

    A complete copy of the same content is shared with the other trainings of this machine; the last
    of them removes it. The next training removes copies that killed trainings left behind.

    Args:
        scratch: A folder, which may contain variables of this machine's environment.
        cache: The cache in the shared folder.
        stop: Whether the training is to end; no wait continues then.
    """
    start = time.monotonic()
    with contextlib.ExitStack() as held:
        try:
            original = artifact.read(cache, "cache", verify=False)
            needed = sum(int(entry["bytes"]) for entry in original.files.values())
            copy = held.enter_context(_copy(_folder(scratch), original, needed, stop))
        except (_NoCopyError, PipelineError, OSError) as error:
            why = error.what if isinstance(error, PipelineError) else str(error)
            yield cache, f"{socket.gethostname()}: the cache is read from {cache}: {why}"
            return
        took = f"{disk.size(needed)}, {time.monotonic() - start:.0f} s"
        yield copy, f"{socket.gethostname()}: the cache is read from its copy {copy} ({took})"


def _folder(scratch: str) -> Path:
    folder = disk.on_this_machine(scratch, "launch.scratch")
    if not folder.is_dir():
        raise _NoCopyError(f"launch.scratch {folder} is no folder on this machine")
    if (kind := disk.mount(folder)[1]) in disk.IN_MEMORY:
        raise _NoCopyError(f"launch.scratch {folder} is memory, no disk ({kind})")
    return folder


@contextlib.contextmanager
def _copy(scratch: Path, cache: Artifact, needed: int, stop: Callable[[], bool]) -> Iterator[Path]:
    """Yield the complete copy and hold it for the time of the block."""
    # If machines share the folder, flock may not work between them.
    own = f"{PREFIX}{os.getuid()}-{socket.gethostname()}"
    place = scratch / f"{own}-{cache.identity[:32]}"
    for other in scratch.glob(f"{own}-*"):
        if other.name.rpartition("-")[0] == own and other != place:
            _remove_unused(other)
    lock = _lock_shared(place, cache, needed, stop)
    try:
        yield place / COPY
    finally:
        lock.close()
        _remove_unused(place)


def _lock_shared(place: Path, cache: Artifact, needed: int, stop: Callable[[], bool]) -> IO[str]:
    """Return the lock, held shared, of a complete copy, which is made or replaced if necessary."""
    made = 0
    while True:
        lock = _open(place)
        try:
            _wait(lock, fcntl.LOCK_SH, stop)
            if _is_there(lock, place) and _is_whole(place, cache):
                return lock
            if (place / COPY).exists():  # damaged, and another training may be reading it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif not _lock(lock, fcntl.LOCK_EX):
                # Another asked at the same time; it makes the copy, and then reads it to its end.
                lock.close()
                _pause(stop)
                continue
            if _is_there(lock, place) and not _is_whole(place, cache):
                if made == TRIES:
                    raise _NoCopyError(
                        f"its copy {place / COPY} was made {TRIES} times, never whole"
                    )
                _make(place, cache, needed, stop)
                made += 1
        except BlockingIOError as error:
            lock.close()
            why = f"its copy {place / COPY} is damaged, and another training reads that"
            raise _NoCopyError(why) from error
        except BaseException:
            lock.close()
            _remove_unused(place)
            raise
        # flock does not convert an exclusive lock into a shared one atomically.
        lock.close()


def _open(place: Path) -> IO[str]:
    while True:
        place.mkdir(mode=0o700, exist_ok=True)
        if place.is_symlink() or place.stat().st_uid != os.getuid():
            raise _NoCopyError(f"{place} is not yours")
        with contextlib.suppress(FileNotFoundError):  # removed since
            return open_to_change(place / LOCK, make=True)


def _wait(lock: IO[str], how: int, stop: Callable[[], bool]) -> None:
    while not _lock(lock, how):
        _pause(stop)


def _lock(lock: IO[str], how: int) -> bool:
    """Take a lock if it is free."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pause(stop: Callable[[], bool]) -> None:
    if stop():
        raise _NoCopyError("the training is to stop")
    time.sleep(POLL_SECONDS)


def _is_there(lock: IO[str], place: Path) -> bool:
    """Return whether the lock is the folder's; the folder may have been removed and made again."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (place / LOCK).stat())
    except FileNotFoundError:
        return False


def _is_whole(place: Path, cache: Artifact) -> bool:
    """Return whether the copy exists and every file has the hash in the cache's manifest."""
    if not (place / COPY).is_dir():
        return False
    try:
        replace(cache, folder=place / COPY).verify()
    except (PipelineError, OSError):
        return False
    return True


def _make(place: Path, cache: Artifact, needed: int, stop: Callable[[], bool]) -> None:
    for name in (COPY, NEW):
        shutil.rmtree(place / name, ignore_errors=True)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise _NoCopyError(
            f"launch.scratch {place.parent} has {disk.size(free)} free, its copy takes "
            f"{disk.size(needed)}"
        )

    def copy(name: str) -> None:
        source = cache.folder / name if name == MANIFEST else cache.path(name)
        target = place / NEW / name
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with open_to_read(source) as reading, open_new(target) as writing:
            while chunk := reading.read(CHUNK):
                if stop():
                    raise _NoCopyError("the training is to stop")
                digest.update(chunk)
                writing.write(chunk)
        if name != MANIFEST and digest.hexdigest() != cache.files[name]["sha256"]:
            raise _NoCopyError(f"{source}: its copy has another hash than {MANIFEST} says")

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(copy, [*cache.files, MANIFEST]):
            pass
    (place / NEW).rename(place / COPY)


def _remove_unused(place: Path) -> None:
    """Remove a copy that no training reads or makes."""
    if place.is_symlink():
        return  # a shared folder: it leads to what is not ours
    with contextlib.suppress(OSError), open_to_change(place / LOCK, make=True) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_there(lock, place):
            shutil.rmtree(place, ignore_errors=True)
