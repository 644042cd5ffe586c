"""Large files, written past the page cache (open(2), O_DIRECT), block by block.

Writes through the cache first need pages for all data, evict pages that the machine needs next, and
wait for the disk at the end anyway; and reads from the cache say nothing about the disk. On file
systems without direct access, files are written normally.
"""

from __future__ import annotations

import contextlib
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

from zerotrain.machine.regular_file import open_new

BLOCK_BYTES = 4 * 1024**2
"""Bytes that are converted, hashed, written or compared at a time."""

ALIGNED_BYTES = 4096
"""Direct access requires offsets, addresses and lengths to be multiples of this."""

BLOCKS = 3
"""One is filled, one is hashed and written, and one buffers the slower of the two."""


class DirectWriter:
    """A new file: one thread appends to it, a second hashes it, a third writes it to disk.

    It is a context manager: after a block without errors the file is complete and on disk (fsync).
    """

    def __init__(self, path: Path) -> None:
        self.sha256 = ""
        """The file's sha256, once it is complete."""
        self._stream = open_new(path)
        self._handle = self._stream.fileno()
        with contextlib.suppress(OSError):  # a file system without direct access
            fcntl.fcntl(self._handle, fcntl.F_SETFL, os.O_DIRECT)
        # Aligned to pages, which are allocated when they are first written to.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = [mmap.mmap(-1, BLOCK_BYTES, flags=private) for _ in range(BLOCKS)]
        self._blocks = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]
        self._under_way: list[list[Future[Any]]] = [[] for _ in self._blocks]
        self._hasher, self._disk = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._digest = hashlib.sha256()
        self._now = self._filled = self._written = 0

    def append(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Append the elements row by row, converted; the tensor may be changed afterwards.

        The bytes appended so far must be a multiple of the dtype's size.
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
            self._stream.close()

    def _hand_over(self) -> None:
        """Submit the block for hashing and writing, and wait until the next one is free."""
        data = memoryview(self._memory[self._now])
        # The last block is written with a remainder of older data, which is truncated at the end.
        whole = data[: -(-self._filled // ALIGNED_BYTES) * ALIGNED_BYTES]
        self._under_way[self._now] = [
            self._hasher.submit(self._digest.update, data[: self._filled]),
            self._disk.submit(_write, self._handle, whole, self._written),
        ]
        self._written += self._filled
        self._filled, self._now = 0, (self._now + 1) % BLOCKS
        _settle(self._under_way[self._now])


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy and convert.

    Without conversion this thread copies alone: torch would start a second team of threads next to
    the one that computes.
    """
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
            # The disk has larger blocks, or is full and stopped within one.
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _settle(under_way: list[Future[Any]]) -> None:
    for part in under_way:
        part.result()
