"""Files of torch.save, loaded without running code from their pickles.

They are uncompressed zips, whose checksums a mapped read skips.
"""

from __future__ import annotations

import mmap
import pickle
import re
import resource
import signal
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from zlib_ng import zlib_ng

from zerotrain.errors import PipelineError
from zerotrain.machine.confined import SECONDS, Confined
from zerotrain.machine.memory_errors import find_out_of_memory
from zerotrain.machine.regular_file import open_to_read

BYTES_PER_SECOND = 50 * 2**20
"""Of a slow disk."""


class Record:
    """A stand-in for another program's object: its attributes without its code."""

    def __new__(cls, *arguments: Any) -> Record:
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _numpy_scalar(dtype: Record, data: bytes = b"") -> float | int | None:
    code = getattr(dtype, "arguments", ("",))[0]
    formats = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i", "b1": "<?"}
    return struct.unpack(formats[code], data)[0] if code in formats else None


def _enum_text(value: object = "") -> str:
    """Read an enum member that is a text; the text of anything else can be exponentially long."""
    if not isinstance(value, str):
        raise pickle.UnpicklingError("the name of an enum member has another type")
    return value


def _enum_number(value: object = 0) -> int:
    if not isinstance(value, int):
        raise pickle.UnpicklingError("the number of an enum member has another type")
    return value


_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def _enum_member(stand_in: Callable[..., Any], name: str) -> int | str:
    """Read an enum member that Python 3.11.0 to 3.11.3 pickled as getattr(class, name)."""
    return _ZERO_STAGES.get(name, name) if stand_in is _enum_number else name


_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_enum_number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_enum_member, "builtins.getattr"),
    (_enum_member, "getattr"),
    (_enum_text, "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum"),
    (_enum_text, "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile"),
    *(
        (Record, name)
        for name in (
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.utils.tensor_fragment.fragment_address",
            "deepspeed.utils.tensor_fragment.tensor_fragment",
            "argparse.Namespace",
            "pathlib.PosixPath",
            "pathlib.WindowsPath",
            "numpy.dtype",
            "numpy.ndarray",
        )
    ),
    *(
        (stand_in, f"numpy.{core}.{name}")
        for core in ("core", "_core")
        for stand_in, name in (
            (_numpy_scalar, "multiarray.scalar"),
            (Record, "multiarray._reconstruct"),
        )
    ),
]
"""Classes in real checkpoints of DeepSpeed and accelerate, in addition to torch's."""


def load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Load a torch.save file, with tensors mapped from the file.

    Classes other than torch's and those above are refused unless `trust_pickle`; before that no
    code from the file runs. The file's bytes are checked against its checksums first, which a
    mapped read skips.

    Raises:
        PipelineError: the file is missing, truncated or damaged, or names a class that is not
            listed.
    """
    if not path.is_file():
        raise PipelineError(
            f"{path}: no such file", hint="the checkpoint is incomplete; copy it again, whole"
        )
    mapped = is_zip(path)  # files from before torch 1.6 cannot be mapped
    if mapped:
        check_records(path)
    if not trust_pickle:
        _check_cost(path)
    try:
        loaded = _load(path)
    except pickle.UnpicklingError as error:
        if not trust_pickle:
            raise _refusal(path, error) from error
    except Exception as error:  # damaged bytes can raise anything
        if find_out_of_memory(error):
            raise
        raise _unreadable(path, error) from error
    else:
        _check_sizes(path, loaded)
        return loaded
    try:
        return torch.load(path, weights_only=False, map_location="cpu", mmap=mapped)
    except Exception as error:  # code in a pickle can raise anything
        if find_out_of_memory(error):
            raise
        raise _unreadable(path, error) from error


def _load(path: Path) -> Any:
    with torch.serialization.safe_globals(_STAND_INS):
        mapped = is_zip(path)
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)


def _try(path: str) -> str:
    """Load a file in the child; what is no matter of time and memory, the caller meets itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = Path(path).stat().st_size  # it is mapped, or read
    room = soft + size if hard == resource.RLIM_INFINITY else min(soft + size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (room, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS + size / BYTES_PER_SECOND)
    try:
        _load(Path(path))
    except Exception as error:
        if find_out_of_memory(error):
            raise MemoryError from error
    return ""


_TRIAL = Confined(_try, "pickle")


def _check_cost(path: Path) -> None:
    """Check that a file is loaded in the time and memory that its size explains.

    A few bytes can ask torch's own reader for any memory (bytearray(2**40)), for a value whose hash
    takes years, or end the process.

    Raises:
        PipelineError: it takes more, or ends its process.
    """
    try:
        _TRIAL(str(path.resolve()))
    except PipelineError as error:
        raise PipelineError(
            f"{path}: {error.what}", hint="do not use it if you do not know who made it"
        ) from error


def _check_sizes(path: Path, loaded: Any) -> None:
    """Check that the file holds the numbers of each tensor.

    A stride of 0 repeats a number without storing it, and a reader that copies the tensor allocates
    the whole of it.

    Raises:
        PipelineError: a tensor is larger than the file.
    """
    size = path.stat().st_size
    waiting, seen = [loaded], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            if one.numel() * one.element_size() > size:
                raise PipelineError(
                    f"{path}: a tensor of shape {list(one.shape)} repeats its numbers: it takes "
                    f"{one.numel() * one.element_size()} bytes, and the file has {size}",
                    hint="copy the checkpoint again, or use an older one",
                )
        elif id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, Record):
                one = vars(one)
            if isinstance(one, dict):
                waiting += one.values()
            elif isinstance(one, list | tuple | set):
                waiting += one


def _refusal(path: Path, error: Exception) -> PipelineError:
    named = re.search(r"GLOBAL (\S+)", str(error))
    what = f"the class {named[1]}" if named else "what cannot be read without running code"
    return PipelineError(
        f"{path}: its pickle asks for {what}, and a pickle can run any program",
        hint="--trust-pickle, if you trust who made it",
    )


def _unreadable(path: Path, error: Exception) -> PipelineError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return PipelineError(
        f"{path}: truncated or no file of torch.save, {path.stat().st_size} bytes ({first})",
        hint="copy the checkpoint again, or use an older one",
    )


BLOCK_BYTES = 16 * 1024**2
LOCAL_HEADER_BYTES = 30
NAME_LENGTH, EXTRA_LENGTH = slice(26, 28), slice(28, 30)
"""Fields of a record's local header (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT)."""


def is_zip(path: Path) -> bool:
    """Return whether a file has torch's zip format, rather than the format before version 1.6."""
    with open_to_read(path, follow_links=True) as stream:
        return stream.read(4) == b"PK\x03\x04"


def check_records(path: Path) -> None:
    """Compare every byte of every record with the CRC32 that was saved with it.

    The file is mapped and read once, block by block; this process reads it again only if it has
    changed.

    Args:
        path: A torch.save file in zip format.

    Raises:
        PipelineError: a record has other bytes or is compressed, or the directory is damaged.
    """
    status = path.stat()
    _check(
        path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


@cache
def _check(path: Path, *identity: int) -> None:
    entries = _entries(path)
    _refuse_compressed(path, entries)
    if not _have_checksums(entries):
        return
    with (
        open_to_read(path, follow_links=True) as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        view = memoryview(mapped)
        try:
            for entry in entries:
                if _checksum(view, entry) != entry.CRC:
                    raise PipelineError(
                        f"{path}: damaged: its record {entry.filename} does not have the checksum "
                        "that was saved with it",
                        hint="copy the checkpoint again, or use an older one",
                    )
        finally:
            view.release()


def _refuse_compressed(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Check that no record is compressed, since a small one can fill the memory."""
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise PipelineError(
                f"{path}: its record {entry.filename} is compressed, {entry.compress_size} bytes "
                f"for {entry.file_size}; torch.save compresses none",
                hint="copy the checkpoint again, or use an older one",
            )


def has_checksums(path: Path) -> bool:
    """Return whether check_records can detect damage: torch can omit the checksums."""
    return is_zip(path) and _have_checksums(_entries(path))


def saved_name(path: Path) -> str | None:
    """Return the name under which torch.save wrote a file; None if it wrote to a stream.

    Its records are in a folder named after the file, without its suffix.
    """
    if not is_zip(path):
        return None
    folders = {entry.filename.split("/", 1)[0] for entry in _entries(path)}
    return None if folders == {"archive"} or len(folders) != 1 else f"{folders.pop()}{path.suffix}"


def _entries(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise PipelineError(
            f"{path}: truncated or damaged, {path.stat().st_size} bytes ({error})",
            hint="copy the checkpoint again, or use an older one",
        ) from error


def _have_checksums(entries: list[zipfile.ZipInfo]) -> bool:
    return any(entry.CRC for entry in entries)


def _checksum(view: memoryview, entry: zipfile.ZipInfo) -> int | None:
    """Compute the CRC32 of a record's bytes; None if they are not at the place in the directory."""
    header = view[entry.header_offset : entry.header_offset + LOCAL_HEADER_BYTES]
    if len(header) < LOCAL_HEADER_BYTES or entry.compress_type != zipfile.ZIP_STORED:
        return None
    lengths = (int.from_bytes(header[field], "little") for field in (NAME_LENGTH, EXTRA_LENGTH))
    start = entry.header_offset + LOCAL_HEADER_BYTES + sum(lengths)
    end = start + entry.file_size
    if end > len(view):
        return None
    crc = 0
    for place in range(start, end, BLOCK_BYTES):
        crc = zlib_ng.crc32(view[place : min(place + BLOCK_BYTES, end)], crc)
    return crc
