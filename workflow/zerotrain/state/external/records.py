"""The records of a torch.save file: an uncompressed zip with checksums that a mapped read skips."""

from __future__ import annotations

import mmap
import zipfile
from functools import cache
from pathlib import Path

from zlib_ng import zlib_ng

from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read

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
