"""Host memory for what a save copies, so that training need not wait for the disk."""

from __future__ import annotations

import mmap

import torch

ALIGNED_BYTES = 64


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
