"""Safetensors files, written and compared tensor by tensor, with a few blocks in memory.

The format (https://huggingface.co/docs/safetensors): the header's length as eight bytes, little
endian; the header, JSON padded with spaces to a multiple of eight bytes; then the tensors' bytes,
row by row, without gaps.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from zerotrain.artifact.direct_io import BLOCK_BYTES, DirectWriter
from zerotrain.artifact.documents import DocumentError, read_entries, read_header
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_new, open_to_read

FLUSH_BYTES = 64 * 1024**2
"""After this many bytes a flush to disk starts, while more are written."""

HEADER_ROOM = 64 * 1024
"""Bytes reserved for the header of a file whose tensors are not known beforehand."""

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

TYPES = {name: dtype for dtype, name in DTYPES.items()}

FLOAT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in a configuration."""
MIXED_PRECISION = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of a pass, by launch.mixed_precision."""

Layout = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Dtype and shape of each tensor of a file, by name."""


def write_tensor_file(
    path: Path,
    layout: Layout,
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file with a known header, one tensor at a time.

    `read` is called once per name, in the layout's order with wide dtypes first, so that each
    tensor is aligned. A tensor of another floating dtype is converted block by block; one that is
    not row-major is copied as a whole.

    Args:
        path: The file, which is replaced; it is on disk (fsync) at the return.
        layout: The tensors' dtypes and shapes.
        read: Returns a tensor by name, on any device.
        metadata: Further entries of the header. They are sorted, so that equal entries give equal
            bytes; the library's writer orders several at random.

    Returns:
        The file's sha256, computed while writing.

    Raises:
        ValueError: a tensor's shape differs from the layout.
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
            del tensor  # or it would stay until the next one has been read
    return file.sha256


class _FlushedStream:
    """A file that a thread flushes to disk while it is written, so the final flush is short."""

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
            # The kernel reports a failed write only once, so a later fsync would succeed.
            self._flushing.result()
            self._flushing = None
        if self._flushing is None and self._unflushed >= FLUSH_BYTES:
            self._file.flush()
            self._flushing = self._disk.submit(os.fdatasync, self._file.fileno())
            self._unflushed = 0

    def seek(self, place: int) -> None:
        """Go to an offset from the file's start."""
        self._file.seek(place)

    def flush(self) -> None:
        """Flush everything to disk; no writes may follow."""
        self._disk.shutdown()
        if self._flushing is not None:
            self._flushing.result()
        self._file.flush()
        os.fsync(self._file.fileno())


class OpenTensorFile:
    """A safetensors file that accepts tensors as they come; its header is written last.

    The header precedes the tensors, so HEADER_ROOM bytes are reserved for it.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_new(path)
        self._stream = _FlushedStream(self._file)
        self._stream.seek(8 + HEADER_ROOM)
        self._entries: dict[str, Any] = {}
        self._header_bytes = len(_header({}))
        self.size = 0
        """Bytes of the tensors so far."""

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the header has room for one more tensor; the first always fits."""
        return not self._entries or self._grown(name, tensor) <= HEADER_ROOM

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor; it may be changed once this returns."""
        self._header_bytes = self._grown(name, tensor)
        end = self.size + tensor.nbytes
        self._entries[name] = _entry(tensor.dtype, tensor.shape, self.size, end)
        for part in chunks(tensor, tensor.dtype):
            self._stream.write(_bytes(part))
        self.size = end

    def close(self) -> list[str]:
        """Write the header, flush the file to disk (fsync), and return the names in it."""
        self._stream.seek(0)
        self._stream.write(_header(self._entries, room=HEADER_ROOM))
        self._stream.flush()
        self._file.close()
        return list(self._entries)

    def _grown(self, name: str, tensor: torch.Tensor) -> int:
        # 20 digits per offset are more than any file needs.
        entry = {name: _entry(tensor.dtype, tensor.shape, 10**19, 10**19)}
        return self._header_bytes + len(_compact(entry))


def chunks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the elements row by row as flat CPU tensors of this dtype, at most BLOCK_BYTES each."""
    flat = tensor.detach().reshape(-1)
    length = BLOCK_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), length):
        yield flat[start : start + length].to("cpu", dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether `a` has the shape of `b` and the bits of `b` converted to the dtype of `a`."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.shape == b.shape and all(
        torch.equal(x.view(bits), y.to(a.dtype).view(bits)) for x, y in pairs(a, b)
    )


def pairs(
    a: torch.Tensor, b: torch.Tensor, nbytes: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield two tensors of one shape in equal flat parts of at most `nbytes`, on CPU."""
    first, second = a.detach().reshape(-1), b.detach().reshape(-1)
    length = (nbytes or BLOCK_BYTES) // max(a.dtype.itemsize, b.dtype.itemsize)
    for start in range(0, first.numel(), length):
        part = slice(start, start + length)
        yield first[part].cpu(), second[part].cpu()


class TensorParts:
    """Parts of the tensors of safetensors files, read instead of mapped.

    A process that needs a quarter of a file reads a quarter of it, in large pieces, directly into
    the destination tensor. Pages of a mapped file are loaded with their neighbours, a few at a
    time. The files stay open as long as this object lives.
    """

    def __init__(self) -> None:
        self._open: dict[Path, tuple[BinaryIO, int, dict[str, Any]]] = {}
        weakref.finalize(self, _close, self._open)

    def names(self, path: Path) -> list[str]:
        """Return the tensors of a file."""
        return [name for name in self._file(path)[2] if name != "__metadata__"]

    def fill(self, path: Path, name: str, start: int, into: torch.Tensor) -> None:
        """Fill a flat tensor of any device and dtype with a tensor's elements from element `start`.

        Raises:
            ValueError: the tensor has fewer elements.
            PipelineError: the file ends early.
        """
        handle, base, entries = self._file(path)
        dtype = TYPES[entries[name]["dtype"]]
        first, end = (base + offset for offset in entries[name]["data_offsets"])
        place, size = first + start * dtype.itemsize, dtype.itemsize
        if place + into.numel() * size > end:
            raise ValueError(f"{path}: {name} has no {into.numel()} elements from {start} on")
        if into.device.type == "cpu" and into.dtype == dtype and into.is_contiguous():
            _read(handle, _bytes(into), place, path)
            return
        length = BLOCK_BYTES // size
        block = torch.empty(min(length, into.numel()), dtype=dtype)
        for at in range(0, into.numel(), length):
            part = block[: into.numel() - at]
            _read(handle, _bytes(part), place + at * size, path)
            into[at : at + len(part)].copy_(part)

    def _file(self, path: Path) -> tuple[int, int, dict[str, Any]]:
        """Return the file's handle, the offset of its tensors, and its header."""
        if path not in self._open:
            entries, base = read_entries(path)
            self._open[path] = open_to_read(path), base, entries
        stream, base, entries = self._open[path]
        return stream.fileno(), base, entries


def _close(files: dict[Path, tuple[BinaryIO, int, dict[str, Any]]]) -> None:
    for stream, _, _ in files.values():
        stream.close()


def _read(handle: int, into: memoryview, place: int, path: Path) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(handle, [into[done:]], place + done)
        if not count:
            raise PipelineError(
                f"{path}: ends early",
                hint="it was cut off after it had been checked: look at the disk, then start "
                "again; the newest checkpoint that is complete is taken",
            )
        done += count


def open_file(path: Path) -> Any:
    """Open a safetensors file by its own library, after its header has been checked.

    Raises:
        FileError: it is missing, or is a folder, a pipe or a device.
        DocumentError: it is no such file, or is cut off.
    """
    read_header(path, follow_links=True, whole=True)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:  # as of a key that an entry has in addition
        raise DocumentError(path, f"is no safetensors file ({error})") from error


def open_tensors(paths: Iterable[Path]) -> dict[str, Any]:
    """Open files and return the open file of each tensor; pages are loaded on access.

    Raises:
        DocumentError: as open_file.
    """
    found: dict[str, Any] = {}
    for path in paths:
        file = open_file(path)
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
    metadata_entries = dict(sorted({**METADATA, **(metadata or {})}.items()))
    text = _compact({"__metadata__": metadata_entries, **entries})
    text = text.ljust(max(room, -(-len(text) // 8) * 8))
    return len(text).to_bytes(8, "little") + text
