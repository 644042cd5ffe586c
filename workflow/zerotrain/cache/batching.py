"""Batches to encode: how many images at a time, grouped by size, and back in the keys' order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from zerotrain.data.buckets import Size

T = TypeVar("T")

PIXELS_AT_A_TIME = 1024 * 1024
"""Pixels of a batch on a CPU."""
MOST_IMAGES_AT_A_TIME = 32
BYTES_PER_PIXEL = 4096
"""Memory of a GPU for a pixel of a batch: the encoder's widest layers hold 128 channels of fp32 at
full size, eight times."""
LEAST_IMAGES_ON_GPU = 2
IMAGES_IN_WINDOW = 1024
"""Images that are encoded before their latents are written, in the order of the keys. A window has
images of every size; at its end, a batch of each size is filled with copies."""


class Window(NamedTuple):
    """Keys that are encoded before any later one, in their order and grouped by size."""

    keys: list[str]
    by_size: list[str]


def batch_size(size: Size, gpu_bytes: int | None = None) -> int:
    """Return how many images are encoded at a time.

    On a GPU these are as many as half of its memory holds, a power of two; the other half is for
    weights. Memory in use does not count: the last bits depend on the number.

    Args:
        size: Width and height of the images.
        gpu_bytes: Memory of the GPU; None on a CPU.
    """
    pixels = size[0] * size[1]
    if gpu_bytes is None:
        return max(1, min(MOST_IMAGES_AT_A_TIME, PIXELS_AT_A_TIME // pixels))
    most = max(LEAST_IMAGES_ON_GPU, gpu_bytes // 2 // (BYTES_PER_PIXEL * pixels))
    return min(MOST_IMAGES_AT_A_TIME, 1 << (most.bit_length() - 1))


def split(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Split items into batches; the last one may be smaller."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def filled(batch: Sequence[T], size: int) -> list[T]:
    """Fill a batch with copies of its last member."""
    return [*batch, *[batch[-1]] * (size - len(batch))]


def split_by_size(keys: Sequence[str], size: int, size_of: Callable[[str], Size]) -> list[Window]:
    """Split keys into windows.

    Args:
        keys: The keys.
        size: Members of a usual batch, of which a window has a whole number.
        size_of: Returns the size of a key's image.
    """
    length = -(-IMAGES_IN_WINDOW // size) * size
    return [Window(held, sorted(held, key=size_of)) for held in split(keys, length)]


def restore_order(
    windows: Iterable[Window], encode: Callable[[list[str]], Iterator[tuple[str, T]]]
) -> Iterator[T]:
    """Encode the keys of each window by size, and yield the results in the order of the keys.

    Args:
        windows: The windows.
        encode: Yields the results of keys that are grouped by size, with their keys.
    """
    for keys, by_size in windows:
        encoded = encode(by_size)
        found: dict[str, T] = {}
        for key in keys:
            while key not in found:
                found.update([next(encoded)])
            yield found.pop(key)
