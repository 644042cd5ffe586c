"""Safetensors files, written and compared tensor by tensor: memory is a few blocks.

The format (https://huggingface.co/docs/safetensors): the header's length as eight bytes, little
end first; the header, JSON padded with spaces to a multiple of eight bytes; then the tensors'
bytes, row by row, one after the other without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from zerotrain.direct_file import BLOCK_BYTES, DirectWriter

FLUSH_BYTES = 64 * 1024**2
"""After as many bytes the system is asked to bring them to disk, while more are written."""

HEADER_ROOM = 64 * 1024
"""Bytes left free for the header of a file whose tensors are not known beforehand."""

METADATA = {"format": "pt"}
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Layout = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Type and shape of each tensor of a file, by name."""


def write_tensor_file(
    path: Path,
    layout: Layout,
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file whose header is known, one tensor at a time.

    `read` is asked once for each name when its turn comes: in the layout's order, wide types first,
    so that each tensor stays aligned. A tensor of another floating type is converted block by block
    on its way; one that does not lie row by row is copied whole.

    Args:
        path: The file, which is replaced; it is on disk (fsync) at the return.
        layout: The tensors' types and shapes.
        read: Gives the tensor of a name, on any device.
        metadata: Further entries of the header. They stand sorted there, so that equal ones give
            equal bytes; the library's own writer puts several in an order of chance.

    Returns:
        The file's sha256, computed on the way.

    Raises:
        ValueError: a tensor has another shape than the layout says.
    """
    names = sorted(layout, key=lambda name: -layout[name][0].itemsize)
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = layout[name]
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = _entry(dtype, shape, start, end)
    header = bytearray(_header(entries, metadata=metadata))
    with DirectWriter(path) as file:
        file.append(torch.frombuffer(header, dtype=torch.uint8), torch.uint8)
        for name in names:
            dtype, shape = layout[name]
            tensor = read(name)
            if list(tensor.shape) != list(shape):
                raise ValueError(f"{name}: shape {list(tensor.shape)}, expected {list(shape)}")
            file.append(tensor, dtype)
    return file.sha256


class _FlushedStream:
    """A file that a thread brings to disk while it is written, so that the end waits for little."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._disk = ThreadPoolExecutor(1)
        self._flushing: Future[None] | None = None
        self._unflushed = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(data)
        self._unflushed += len(data)
        if self._flushing is not None and self._flushing.done():
            # The kernel tells of a failed write once, so that a later fsync would succeed.
            self._flushing.result()
            self._flushing = None
        if self._flushing is None and self._unflushed >= FLUSH_BYTES:
            self._file.flush()
            self._flushing = self._disk.submit(os.fdatasync, self._file.fileno())
            self._unflushed = 0

    def seek(self, place: int) -> None:
        """Go to a place, counted from the file's start."""
        self._file.seek(place)

    def flush(self) -> None:
        """Bring all of it to disk; nothing is written any more."""
        self._disk.shutdown()
        if self._flushing is not None:
            self._flushing.result()
        self._file.flush()
        os.fsync(self._file.fileno())


class OpenTensorFile:
    """A safetensors file that takes tensors as they come; its header is written last.

    The header stands before the tensors, so HEADER_ROOM bytes are left for it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._stream = _FlushedStream(self._file)
        self._stream.seek(8 + HEADER_ROOM)
        self._entries: dict[str, Any] = {}
        self._header_bytes = len(_header({}))
        self.size = 0
        """Bytes of the tensors so far."""

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the header has room for one more tensor; the first has it always."""
        return not self._entries or self._grown(name, tensor) <= HEADER_ROOM

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor; it may be changed as soon as this returns."""
        self._header_bytes = self._grown(name, tensor)
        end = self.size + tensor.nbytes
        self._entries[name] = _entry(tensor.dtype, tensor.shape, self.size, end)
        for part in chunks(tensor, tensor.dtype):
            self._stream.write(_bytes(part))
        self.size = end

    def close(self) -> list[str]:
        """Write the header and bring the file to disk (fsync); the names in it."""
        self._stream.seek(0)
        self._stream.write(_header(self._entries, room=HEADER_ROOM))
        self._stream.flush()
        self._file.close()
        return list(self._entries)

    def _grown(self, name: str, tensor: torch.Tensor) -> int:
        # Offsets of 20 digits each are more than any file needs.
        entry = {name: _entry(tensor.dtype, tensor.shape, 10**19, 10**19)}
        return self._header_bytes + len(_compact(entry))


def chunks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The elements row by row as flat tensors on CPU of this type, BLOCK_BYTES or less each."""
    flat = tensor.detach().reshape(-1)
    length = BLOCK_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), length):
        yield flat[start : start + length].to("cpu", dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` has the shape of `b` and the bits of `b` converted to the type of `a`."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.shape == b.shape and all(
        torch.equal(x.view(bits), y.to(a.dtype).view(bits)) for x, y in pairs(a, b)
    )


def pairs(
    a: torch.Tensor, b: torch.Tensor, nbytes: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape in flat parts of equal length, on CPU, `nbytes` each or less."""
    first, second = a.detach().reshape(-1), b.detach().reshape(-1)
    length = (nbytes or BLOCK_BYTES) // max(a.dtype.itemsize, b.dtype.itemsize)
    for start in range(0, first.numel(), length):
        part = slice(start, start + length)
        yield first[part].cpu(), second[part].cpu()


def open_tensors(paths: Iterable[Path]) -> dict[str, Any]:
    """The open file (safetensors.safe_open) of each tensor's name; pages come when read."""
    found: dict[str, Any] = {}
    for path in paths:
        file: Any = safe_open(path, framework="pt")
        found.update(dict.fromkeys(file.keys(), file))
    return found


def _bytes(flat: torch.Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _entry(dtype: torch.dtype, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}


def _compact(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _header(
    entries: dict[str, Any], room: int = 0, metadata: Mapping[str, str] | None = None
) -> bytes:
    said = dict(sorted({**METADATA, **(metadata or {})}.items()))
    text = _compact({"__metadata__": said, **entries})
    text = text.ljust(max(room, -(-len(text) // 8) * 8))
    return len(text).to_bytes(8, "little") + text
