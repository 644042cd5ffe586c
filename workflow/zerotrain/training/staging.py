"""Host memory for what a save copies so that the training need not wait for the disk."""

from __future__ import annotations

import mmap

import torch

ALIGNED_BYTES = 64


class Staging:
    """A stretch of memory that is filled once, tensor after tensor.

    It goes back to the system with the last tensor that lies in it. Pages of 2 MiB (madvise(2)) are
    not asked for: where memory is fragmented, making them holds a copy up for longer than it takes.
    """

    def __init__(self, nbytes: int) -> None:
        """Room for `nbytes`; pages come when they are first written to."""
        self._left = self._size = nbytes
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(nbytes, 1), flags=private)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of a tensor on any device, in its shape and type; None where no room is left."""
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
    """What a tensor takes in a staging, where each begins at an aligned place."""
    return -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
