"""One process's part of a checkpoint, written by a thread while its tensors stay unchanged."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zerotrain.artifact import file_sha256
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read
from zerotrain.state.checkpoint import (
    Fragment,
    rank_files,
    span,
    tensor_name,
    write_rank,
    write_rank_files,
)

ALIGNED_BYTES = 64


@dataclass
class PartReport:
    """A process's report on its part, which is sent to the first process."""

    spans: dict[str, list[int]] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    """sha256 of its files that were hashed while writing."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each of its files, as it sees them."""
    host: str = field(default_factory=socket.gethostname)
    errno: int | None = None
    """The system's error if the part could not be written."""


def check_written(folder: Path, parts: Sequence[PartReport]) -> None:
    """Check that this process sees what all processes have written.

    Args:
        folder: The draft.
        parts: The processes' reports, by rank.

    Raises:
        PipelineError: a file is missing here or has another size.
    """
    seen = set(os.listdir(folder))
    for rank, part in enumerate(parts):
        for name, size in part.sizes.items():
            size_here = _size(folder / name) if name in seen else None
            if size_here == size:
                continue
            here = "is missing" if size_here is None else f"has {size_here:,} bytes"
            raise PipelineError(
                f"{folder}: {name}, which rank {rank} on {part.host} wrote with {size:,} bytes, "
                f"{here} as rank 0 on {socket.gethostname()} sees it: no checkpoint is published",
                hint="the machines do not share this disk, or one of them caches what another "
                "wrote: mount results/ on a file system that all machines see",
            )


def _size(path: Path) -> int | None:
    """Return the bytes of a file, or None if it is missing."""
    try:
        # NFS asks its server again on an open, but may answer a stat from its cache.
        with open_to_read(path) as stream:
            return os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        return None


class WrittenPart:
    """A part that is on disk once it is constructed; only the hashes of its files are pending.

    For fragments that reuse the memory of the one before. A thread hashes the files: each process
    those that it has written.
    """

    def __init__(self, folder: Path, rank: int, fragments: Iterable[Fragment]) -> None:
        self._written = PartReport()
        self._cancelled = False
        self._thread = threading.Thread(
            target=self._hash, args=(folder, rank), name="checkpoint", daemon=True
        )
        try:
            self._written.spans = write_rank(folder, rank, fragments)
        except OSError as error:
            self._written.errno = error.errno or 0
            self._cancelled = True
        self._thread.start()

    def is_writing(self) -> bool:
        """Return whether hashes are still missing."""
        return self._thread.is_alive()

    def release_tensors(self, allowance: int) -> None:
        """Return at once: no tensor of the engine is held."""

    def result(self) -> PartReport:
        """Wait for the hashes and return the report."""
        self._thread.join()
        return self._written

    def cancel(self) -> None:
        """Give up the part, which no process will publish."""
        self._cancelled = True
        self._thread.join()

    def _hash(self, folder: Path, rank: int) -> None:
        try:
            for path in rank_files(folder, rank):
                if self._cancelled:
                    return
                self._written.known[path.name] = file_sha256(path)
                self._written.sizes[path.name] = path.stat().st_size
        except OSError as error:
            self._written.errno = error.errno or 0


class RankWriter:
    """A part written by a thread, with the methods of a WrittenPart.

    Until `release_tensors` has returned, its tensors must not be changed.
    """

    def __init__(self, folder: Path, rank: int, fragments: Iterable[Fragment]) -> None:
        """Start writing into a draft folder; the tensors may be on any device."""
        held = list(fragments)
        self._place = folder, rank
        self._lent = {
            tensor_name(fragment.name, slot): tensor.detach()
            for fragment in held
            for slot, tensor in fragment.slots.items()
        }
        self._sizes = {name: tensor.numel() for name, tensor in self._lent.items()}
        self._copies: dict[str, torch.Tensor] = {}
        self._reading = False
        self._cancelled = False
        self._turn = threading.Condition()
        self._written = PartReport({fragment.name: span(fragment) for fragment in held})
        self._error: BaseException | None = None
        self._side_stream = _open_side_stream(self._lent)
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def is_writing(self) -> bool:
        """Return whether the part is not complete on disk yet."""
        return self._thread.is_alive()

    def release_tensors(self, allowance: int) -> None:
        """Return once the engine's tensors may be changed.

        Copies tensors from the end, up to `allowance` bytes, and waits for the others. The thread
        writes from the start, so that both make progress.
        """
        with self._turn:
            staging = Staging(min(allowance, sum(map(staged_bytes, self._lent.values()))))
        while True:
            with self._turn:
                name = next(reversed(self._lent), None)
                if name is None:
                    self._turn.wait_for(lambda: not self._reading)
                    return
                # Under the lock, so that the thread does not take it meanwhile.
                copied = staging.copy(self._lent[name])
                if copied is None:
                    self._turn.wait()
                else:
                    self._copies[name] = copied
                    del self._lent[name]

    def result(self) -> PartReport:
        """Wait until the part is on disk, or could not be written; return the report."""
        self._thread.join()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        return self._written

    def cancel(self) -> None:
        """Give up the part, which no process will publish."""
        self._cancelled = True
        self._thread.join()

    def _write(self) -> None:
        try:
            with self._side_stream:
                known = write_rank_files(*self._place, self._sizes, self._take)
            self._written.known = known
            self._written.sizes = {n: (self._place[0] / n).stat().st_size for n in known}
        except BaseException as error:  # `result` reports it to the loop
            self._error = error
            self._written.errno = (error.errno or 0) if isinstance(error, OSError) else None
        finally:
            with self._turn:
                self._lent.clear()
                self._copies.clear()
                self._reading = False
                self._turn.notify_all()

    def _take(self, name: str) -> torch.Tensor:
        if self._cancelled:
            raise InterruptedError
        with self._turn:
            self._reading = name in self._lent
            tensor = self._lent.pop(name) if self._reading else self._copies.pop(name)
            self._turn.notify_all()
        return tensor.flatten()


def _open_side_stream(tensors: dict[str, torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context for writing: on a GPU a separate stream, after what is queued so far."""
    device = next((t.device for t in tensors.values() if t.device.type == "cuda"), None)
    if device is None:
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return _on(device, stream)


@contextlib.contextmanager
def _on(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    # A new thread is on device 0. Leaving only the stream would go back there, and take the half
    # gigabyte of a CUDA context on it in every process of the machine.
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


class Staging:
    """A memory block that is filled once, tensor after tensor.

    It is freed with the last tensor in it. Pages of 2 MiB (madvise(2)) are not requested: in
    fragmented memory, making them takes longer than the copy itself.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserve `nbytes`; the first write to a page allocates it."""
        self._left = self._size = nbytes
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(nbytes, 1), flags=private)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor from any device, in its shape and dtype; return None if no room is left."""
        needed = staged_bytes(tensor)
        if needed > self._left:
            return None
        place = self._size - self._left
        self._left -= needed
        if not tensor.nbytes:
            return tensor.to("cpu", copy=True)
        flat = torch.frombuffer(
            self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=place
        )
        return flat.view(tensor.shape).copy_(tensor)


def staged_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a staging, where each starts at an aligned place."""
    return -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
