"""A shard mapped to memory, whose tensors are views: nothing is copied before a batch is made.

safetensors' own reader takes 12 us for a view, and a few hundred bytes for each tensor of an open
file; this one takes 2 us, and 12 bytes for each tensor and 8 for its key. With millions of samples,
every process has thousands of open shards.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain.artifact.documents import DocumentError, read_entries
from zerotrain.artifact.tensor_file import TYPES
from zerotrain.cache.layout import key_of, tensor_name

PREFIX = 16
"""Hexadecimal digits of a key that identify it within a shard: 64 bits."""

AGAIN = "remove the folder of the cache and run snakemake again"
Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class MappedShard:
    """A safetensors file of one series; pages are loaded on first access.

    Args:
        path: The file.
        tensors: Names of the tensors of each key.

    Raises:
        FileError: the file is missing.
        DocumentError: it is no such file, or has other tensors.
    """

    def __init__(self, path: Path, tensors: Sequence[str]) -> None:
        try:
            self._read(path, tensors)
        except (TypeError, LookupError, AttributeError, OverflowError, ValueError) as error:
            if isinstance(error, DocumentError):
                raise
            why = f"its header is damaged ({type(error).__name__}: {error})"
            raise DocumentError(path, why, hint=AGAIN) from error

    def _read(self, path: Path, tensors: Sequence[str]) -> None:
        header, base = read_entries(path)
        size = path.stat().st_size
        header.pop("__metadata__", None)
        keys = sorted({key_of(name) for name in header})
        self._path = path
        self._keys = array("Q", (_prefix(key) for key in keys))
        if len({*self._keys}) < len(keys):
            raise ValueError(f"{path}: two keys have the same {PREFIX} digits")
        self._starts: dict[str, array[int]] = {}
        self._kinds: dict[str, array[int]] = {}
        known: dict[Kind, int] = {}
        for tensor in tensors:
            found = [header[tensor_name(key, tensor)] for key in keys]
            starts = array("Q", (base + one["data_offsets"][0] for one in found))
            kinds = array("I", (known.setdefault(_kind(one), len(known)) for one in found))
            self._starts[tensor], self._kinds[tensor] = starts, kinds
            for key, one, start in zip(keys, found, starts, strict=True):
                if not _is_whole(one, start) or base + one["data_offsets"][1] > size:
                    raise ValueError(f"{path}: {tensor} of {key} has other bytes than its shape")
        file_bytes = torch.from_file(str(path), size=size, dtype=torch.uint8)
        self._known = [
            (_elements(file_bytes, dtype), shape, torch.empty(shape, device="meta").stride())
            for dtype, shape in known
        ]

    def tensors(self, key: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a key, as views.

        Raises:
            DocumentError: the shard does not have the key.
        """
        prefix = _prefix(key)
        row = bisect_left(self._keys, prefix)
        if row == len(self._keys) or self._keys[row] != prefix:
            raise DocumentError(self._path, f"has no {key}", hint=AGAIN)
        return {tensor: self._view(tensor, row) for tensor in self._starts}

    def _view(self, tensor: str, row: int) -> torch.Tensor:
        # One call into torch: each takes microseconds, and there are some for every sample.
        elements, shape, strides = self._known[self._kinds[tensor][row]]
        start = self._starts[tensor][row] // elements.itemsize
        return elements.as_strided(shape, strides, start)


def _prefix(key: str) -> int:
    return int(key[:PREFIX], 16)


def _kind(found: dict[str, Any]) -> Kind:
    return TYPES[found["dtype"]], tuple(found["shape"])


def _is_whole(found: dict[str, Any], start: int) -> bool:
    """Return whether a tensor's bytes are those of its shape, and begin with an element."""
    first, end = found["data_offsets"]
    itemsize = TYPES[found["dtype"]].itemsize
    return bool(end - first == math.prod(found["shape"]) * itemsize and start % itemsize == 0)


def _elements(file_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a file as elements of a type, from its first byte, without a rest that fills none."""
    return file_bytes[: len(file_bytes) // dtype.itemsize * dtype.itemsize].view(dtype)
