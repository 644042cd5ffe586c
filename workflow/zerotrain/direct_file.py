"""Large files, written past the page cache (open(2), O_DIRECT), block by block.

What passes through the cache has to find pages for all of it first, pushes out what the machine
needs next, and waits for the disk at the end all the same; and what is read back from the cache
says nothing of the disk. A file system that takes no direct access is written the ordinary way.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch

BLOCK_BYTES = 4 * 1024**2
"""What is converted, hashed, written or compared at a time."""

ALIGNED_BYTES = 4096
"""Direct access wants places in the file and in memory, and lengths, to be multiples of this."""

BLOCKS = 3
"""One is filled while another is hashed and written, and a third one waits for the slower."""


class DirectWriter:
    """A new file, appended to by one thread, hashed by a second, brought to disk by a third.

    A context manager: at a good end of its block the file is whole and on disk (fsync).
    """

    def __init__(self, path: Path) -> None:
        self.sha256 = ""
        """Of the file, once it is whole."""
        self._handle = _open(path)
        # Aligned to pages, which come when they are first written to.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = [mmap.mmap(-1, BLOCK_BYTES, flags=private) for _ in range(BLOCKS)]
        self._blocks = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]
        self._under_way: list[list[Future[Any]]] = [[] for _ in self._blocks]
        self._hasher, self._disk = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._digest = hashlib.sha256()
        self._now = self._filled = self._written = 0

    def append(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Append the elements row by row, converted; the tensor may be changed afterwards.

        What was appended before must be a multiple of the type's size.
        """
        flat = tensor.detach().reshape(-1)
        while flat.numel():
            block = self._blocks[self._now]
            count = min(flat.numel(), (len(block) - self._filled) // dtype.itemsize)
            end = self._filled + count * dtype.itemsize
            _copy(flat[:count], block[self._filled : end].view(dtype))
            self._filled, flat = end, flat[count:]
            if end == len(block):
                self._hand_over()

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._hand_over()
                for block in self._under_way:
                    _settle(block)
                os.ftruncate(self._handle, self._written)
                os.fsync(self._handle)
                self.sha256 = self._digest.hexdigest()
        finally:
            self._hasher.shutdown()
            self._disk.shutdown()
            os.close(self._handle)

    def _hand_over(self) -> None:
        """Have the block hashed and written, and take the next one when it is free again."""
        data = memoryview(self._memory[self._now])
        # The last block is written with a rest of older data, which is cut off at the end.
        whole = data[: _rounded_up(self._filled)]
        self._under_way[self._now] = [
            self._hasher.submit(self._digest.update, data[: self._filled]),
            self._disk.submit(_write, self._handle, whole, self._written),
        ]
        self._written += self._filled
        self._filled, self._now = 0, (self._now + 1) % BLOCKS
        _settle(self._under_way[self._now])


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy and convert. What needs no converting is copied by this thread alone: torch would start
    a second team of threads beside the one that computes."""
    if source.device.type == "cpu" and source.dtype == into.dtype != torch.bfloat16:
        numpy.copyto(into.numpy(), source.numpy())
    else:
        into.copy_(source)


def _write(handle: int, data: memoryview, place: int) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(handle, data[done:], place + done)
        except OSError as error:
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # A disk of larger blocks, or a full disk that stopped in the middle of one.
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _settle(under_way: list[Future[Any]]) -> None:
    for part in under_way:
        part.result()


def _rounded_up(length: int) -> int:
    return -(-length // ALIGNED_BYTES) * ALIGNED_BYTES
