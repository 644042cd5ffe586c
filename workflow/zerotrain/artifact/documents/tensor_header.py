"""Headers of safetensors files, read without torch or the tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents.json_text import check_object, parse_json
from zerotrain.artifact.documents.limits import AGAIN, MOST_HEADER_BYTES, DocumentError
from zerotrain.machine.regular_file import open_to_read

DTYPE_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64},
    **{"I64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8},
    **{"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
}
"""Bits of an element (https://github.com/huggingface/safetensors, Dtype)."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a safetensors file."""

    dtype: str
    """Its name in the format, as "F32"."""
    shape: tuple[int, ...]
    start: int
    """Of its bytes, from the beginning of the file."""
    end: int


@dataclass(frozen=True)
class TensorHeader:
    """The header of a safetensors file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, by name."""
        return {name: entry.shape for name, entry in self.tensors.items()}


def read_header(
    path: Path, *, follow_links: bool = False, whole: bool = False, hint: str = AGAIN
) -> TensorHeader:
    """Read the header of a safetensors file; no tensor is read.

    Args:
        path: The file.
        follow_links: Whether a link is followed.
        whole: Whether its tensors have to be there, as every library that opens it expects.
        hint: Of the error.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        DocumentError: it is no such file, or an entry has an unknown dtype, or a shape that does
            not fit its bytes, or with `whole`, tensors are missing, overlap or have gaps.
    """
    found, base = read_entries(path, follow_links=follow_links, hint=hint)
    source = f"{path}: header"
    given = found.pop("__metadata__", None)
    metadata = {} if given is None else check_object(given, source, hint=hint)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise DocumentError(source, "__metadata__ has a value that is no text", hint=hint)
    try:
        tensors = {name: _entry(entry, base) for name, entry in found.items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        name = next(name for name, entry in found.items() if not _is_entry(entry, base))
        raise DocumentError(source, f"the entry of {name} is damaged", hint=hint) from error
    if whole:
        end = base
        for entry in sorted(tensors.values(), key=lambda entry: (entry.start, entry.end)):
            if entry.start != end:
                raise DocumentError(source, "tensors overlap or have gaps between them", hint=hint)
            end = entry.end
        if (size := path.stat().st_size) != end:
            raise DocumentError(path, f"has {size:,} bytes, its header says {end:,}", hint=hint)
    return TensorHeader(tensors, metadata)


def read_entries(
    path: Path, *, follow_links: bool = False, hint: str = AGAIN
) -> tuple[dict[str, Any], int]:
    """Read a header as it is, for readers of many tensors that check what they use of each.

    Returns:
        Its entries, with `__metadata__`, and where the tensors' bytes begin in the file.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        DocumentError: it is no such file.
    """
    with open_to_read(path, follow_links=follow_links) as stream:
        begin = stream.read(8)
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > MOST_HEADER_BYTES:
            raise DocumentError(path, f"no safetensors file (a header of {length})", hint=hint)
        text = stream.read(length)
    if len(text) < length:
        raise DocumentError(path, f"its header ends after {len(text)} of {length}", hint=hint)
    source = f"{path}: header"
    return check_object(parse_json(text, source, hint=hint), source, hint=hint), 8 + length


def _entry(entry: Mapping[str, Any], base: int) -> TensorEntry:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    sizes = (*shape, start, end)
    if any(type(size) is not int for size in sizes) or min(sizes) < 0:
        raise TypeError("shape and data_offsets are no sizes")
    if math.prod(shape) * DTYPE_BITS[entry["dtype"]] != (end - start) * 8:
        raise ValueError("the shape has other bytes")
    return TensorEntry(entry["dtype"], shape, base + start, base + end)


def _is_entry(entry: Any, base: int) -> bool:
    try:
        return _entry(entry, base) is not None
    except (TypeError, KeyError, ValueError, AttributeError):
        return False
