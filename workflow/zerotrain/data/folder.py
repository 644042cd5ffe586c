"""A folder of images, with a caption file beside each or one table of captions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.data import metadata
from zerotrain.data.source import Found, Source
from zerotrain.data.table import printable
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config import DataConfig

EXTENSIONS = (
    *(".apng", ".avif", ".bmp", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".jpx", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".psd", ".qoi", ".tga", ".tif", ".tiff"),
    ".webp",
    # Pillow reads none of these; they are listed so that they are reported as bad samples.
    *(".cr2", ".cr3", ".dng", ".heic", ".heif", ".jxl", ".nef", ".svg"),
)
"""Files with these extensions, in capitals too, count as images. Hidden files never do."""


@dataclass
class Listing:
    """What lies in an image folder, in no order; names are relative, with forward slashes."""

    images: list[str] = field(default_factory=list)
    captions: dict[str, str] = field(default_factory=dict)
    """Caption files by name without extension, which is what the image's name begins with."""
    bad: list[Found] = field(default_factory=list)
    """What cannot even be looked at: links that lead out, names that no rule can take."""
    others: list[str] = field(default_factory=list)


class FolderSource(Source):
    """Images of a folder and its subfolders, identified by the bytes of their files."""

    pixel_modules = ("zerotrain.data.decode",)

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self.root = _root(data)
        self.name = str(self.root)
        self.notes = []

    def found(self) -> list[Found]:
        """Images with their captions, and everything bad, sorted by file."""
        listing = list_folder(self.data)
        table = _table(self.data)
        self.notes = self._unread(listing, table)
        found = self._from_table(listing, table) if table else list(self._from_files(listing))
        return sorted([*found, *listing.bad], key=lambda entry: (entry.file, entry.reason or ""))

    def read(self, file: str) -> bytes:
        """The bytes of an image file."""
        return (self.root / file).read_bytes()

    def decode(self, data: bytes) -> Image:
        """The image as upright RGB."""
        from zerotrain.data.decode import decode

        return decode(data)

    def _from_files(self, listing: Listing) -> Iterator[Found]:
        extension = self.data.caption_extension
        read: set[str] = set()
        for image in listing.images:
            stem = os.path.splitext(image)[0]
            if stem in listing.captions:
                read.add(stem)
                yield self._captioned(image, listing.captions[stem])
            else:
                yield Found(image, reason=f"no caption: no {stem}{extension} beside it")
        for stem in listing.captions.keys() - read:
            yield Found(listing.captions[stem], reason="a caption file with no image beside it")

    def _captioned(self, image: str, file: str) -> Found:
        try:
            caption = self.read(file).decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            at = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
            return Found(image, reason=f"caption {file} is not UTF-8 ({at})")
        except OSError as error:
            return Found(image, reason=f"caption {file}: {error.strerror}")
        return Found(image, caption, reason=None if caption else f"caption {file} is empty")

    def _from_table(self, listing: Listing, table: Path) -> list[Found]:
        found = metadata.read_metadata(table, self.root, set(listing.images))
        named = {entry.file for entry in found}
        found += [
            Found(image, reason=f"no row of {table.name} names it")
            for image in listing.images
            if image not in named
        ]
        bad_already = {entry.file for entry in listing.bad}
        return [entry for entry in found if entry.file not in bad_already]

    def _unread(self, listing: Listing, table: Path | None) -> list[str]:
        """A sentence for each kind of file that lies there and is not read."""
        notes = []
        if table and listing.captions:
            notes.append(
                f"captions come from {table}; {len(listing.captions)} "
                f"*{self.data.caption_extension} files in {self.root} are not read"
            )
        used = os.path.realpath(table) if table else None
        others = [
            name
            for name in listing.others
            if not used or os.path.realpath(self.root / name) != used
        ]
        if others:
            files, are = ("files", "are") if len(others) > 1 else ("file", "is")
            notes.append(
                f"{len(others)} other {files} in {self.root}, such as {min(others)}, {are} not read"
            )
        return notes


def folder_files(data: DataConfig) -> list[str]:
    """Images and what holds their captions, as paths, sorted; see source.source_files."""
    root = _root(data)
    listing = list_folder(data)
    table = _table(data)
    names = listing.images if table else [*listing.images, *listing.captions.values()]
    paths = [os.path.join(root, name) for name in names]
    for path in (root, table):
        if path and _unusable_name(str(path)):
            raise _unusable(path, str(_unusable_name(str(path))))
    return sorted([*paths, str(table)] if table else paths)


def list_folder(data: DataConfig) -> Listing:
    """List the image folder with its subfolders; nothing is opened.

    Raises:
        PipelineError: it is missing, is no folder, may not be read, or holds no image.
    """
    root = _root(data)
    listing = Listing()
    try:
        _scan(root, data, listing)
    except FileNotFoundError as error:
        raise _unusable(root, "no such folder") from error
    except NotADirectoryError as error:
        raise _unusable(root, "a file, not a folder") from error
    except OSError as error:
        raise _unusable(root, f"{error.filename}: {error.strerror}") from error
    if not listing.images and not listing.bad:
        seen = [*listing.captions.values(), *listing.others]
        shown = f"; it holds {len(seen)} other files, such as {min(seen)}" if seen else ""
        raise _unusable(root, f"no image in it or its subfolders{shown}")
    return listing


def _scan(root: Path, data: DataConfig, listing: Listing) -> None:
    extension = data.caption_extension.lower()
    real_root = os.path.realpath(root)
    waiting, seen = [""], {real_root}
    while waiting:
        folder = waiting.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                name = folder + entry.name
                if entry.name.startswith("."):
                    continue
                if reason := _unusable_name(entry.name):
                    listing.bad.append(Found(printable(name), reason=reason))
                    continue
                if entry.is_symlink() and not data.follow_symlinks:
                    target = os.path.realpath(entry.path)
                    if os.path.isdir(target) or not target.startswith(real_root + os.sep):
                        listing.bad.append(Found(name, reason=_refused_link(target)))
                        continue
                if entry.is_dir():
                    real = os.path.realpath(entry.path)
                    if real not in seen:
                        seen.add(real)
                        waiting.append(name + "/")
                elif name.lower().endswith(extension):
                    listing.captions[name[: -len(extension)]] = name
                elif name.lower().endswith(EXTENSIONS):
                    listing.images.append(name)
                else:
                    listing.others.append(name)


def _unusable_name(name: str) -> str | None:
    if printable(name) != name:
        return "its name is not UTF-8"
    if "{" in name or "}" in name:
        return "its name holds a brace, which Snakemake takes for a wildcard"
    return None


def _refused_link(target: str) -> str:
    kind = "a link to a folder" if os.path.isdir(target) else "a link that leads out of the folder"
    return f"{kind}, to {target} (data.follow_symlinks: true would take it)"


def _root(data: DataConfig) -> Path:
    return Path(data.images or "").expanduser()


def _table(data: DataConfig) -> Path | None:
    """The metadata file: the one that is named, or one that lies in the folder."""
    if data.metadata:
        table = Path(data.metadata).expanduser()
        if not table.is_file():
            raise PipelineError(
                f"data.metadata: {table}: no such file",
                hint="correct data.metadata; relative paths count from where snakemake runs",
            )
        return table
    inside = [path for name in metadata.NAMES if (path := _root(data) / name).is_file()]
    if len(inside) > 1:
        raise PipelineError(
            f"data.images: {_root(data)} holds {' and '.join(metadata.NAMES)}",
            hint="say which one counts with data.metadata, or remove the other",
        )
    return inside[0] if inside else None


def _unusable(path: Path, why: str) -> PipelineError:
    return PipelineError(
        f"data.images: {path}: {why}",
        hint="give a folder with images (.png, .jpg, .webp, ...); relative paths count from "
        "where snakemake runs",
    )
