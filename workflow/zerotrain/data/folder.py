"""A folder of images, with a caption file next to each, a table of captions, or one for all."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.artifact.documents import DocumentError, LeftOut, read_bytes
from zerotrain.config.image_source import WHITE
from zerotrain.data import metadata
from zerotrain.data.caption_file import (
    BadCaptionError,
    folder_caption,
    read_caption_file,
    repeat_as_named,
)
from zerotrain.data.conditioning import MASK, ConditioningFolders
from zerotrain.data.encodings import SHOWN, is_utf8_as_well
from zerotrain.data.listing import (
    Listing,
    list_conditioning,
    list_images,
    root_of,
)
from zerotrain.data.source import MOST_IMAGE_BYTES, BadImageError, Found, Source
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config.image_source import ImageSourceConfig

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Folders of imagefolder's splits. Source: SPLIT_KEYWORDS in data_files.py of datasets."""


class FolderSource(Source):
    """Images of a folder and its subfolders, identified by the bytes of their files.

    Args:
        data: The section `data` of the configuration.
        root: A folder to read from instead of data.images.
    """

    def __init__(self, data: ImageSourceConfig, root: Path | None = None) -> None:
        self.data = data
        self.root = root or root_of(data)
        self.name = str(self.root)
        self.notes, self.left_out = [], LeftOut()

    def found(self) -> list[Found]:
        """List images with their captions, and all bad entries, sorted by file."""
        return self._found(self._captioned)

    def listed(self) -> list[Found]:
        """List the same without reading caption files next to images."""
        return self._found(lambda image, file: Found(image))

    def conditioning_source(self, position: int) -> Source:
        """Return the folder of the conditioning images at this position."""
        folders = self.data.conditioning_folders
        return FolderSource(self.data, Path(folders[position]).expanduser()) if folders else self

    def mask_source(self, file: str) -> Source:
        """Return the folder of the masks."""
        masks = self.data.mask_images
        return FolderSource(self.data, Path(masks).expanduser()) if masks else self

    def _found(self, read_caption: Callable[[str, str], Found]) -> list[Found]:
        listing = list_images(self.data)
        tables = find_tables(self.data, listing)
        self.notes, self.left_out = self._unread(listing, tables), LeftOut()
        if tables:
            found = self._from_tables(listing, tables)
        else:
            found = [*self._from_files(listing, read_caption)]
        self.notes += self._utf8_captions(found)
        if self.data.conditioning_folders:
            folders = ConditioningFolders(self.data)
            self.notes += folders.surplus(listing.images)
            found = [folders.match(entry) for entry in found]
        if self.data.mask_images:
            masks = ConditioningFolders(self.data, [self.data.mask_images], MASK)
            self.notes += masks.surplus(listing.images)
            found = [masks.match_mask(entry) for entry in found]
        if self.data.folder_repeats:
            found = [repeat_as_named(entry, self.root) for entry in found]
        return sorted([*found, *listing.bad], key=lambda entry: (entry.file, entry.reason or ""))

    def read(self, file: str) -> bytes:
        """Read the bytes of an image file.

        Raises:
            BadImageError: it has more than MOST_IMAGE_BYTES.
            OSError: it is unreadable.
        """
        path = self.root / file
        try:
            return read_bytes(path, most=MOST_IMAGE_BYTES, follow_links=True)
        except DocumentError as error:
            why = f"has {path.stat().st_size:,} bytes; images are read up to {MOST_IMAGE_BYTES:,}"
            raise BadImageError(why) from error

    def decode(self, data: bytes, background: str | None = None) -> Image:
        """Decode an image to upright RGB."""
        from zerotrain.data.decode import decode

        return decode(data, background or WHITE)

    def _from_files(
        self, listing: Listing, read_caption: Callable[[str, str], Found]
    ) -> Iterator[Found]:
        if self.data.caption_strategy != "textfile":
            yield from (Found(image, given_caption(self.data, image)) for image in listing.images)
            return
        extension = self.data.caption_extension
        read: set[str] = set()
        for image in listing.images:
            stem = os.path.splitext(image)[0]
            if stem in listing.captions:
                read.add(stem)
                yield read_caption(image, listing.captions[stem])
            elif self.data.folder_repeats and (named := self._named(image)):
                yield Found(image, named)
            else:
                yield Found(image, reason=f"no caption: no {stem}{extension} next to it")
        for stem in listing.captions.keys() - read:
            yield Found(listing.captions[stem], reason="a caption file with no image next to it")

    def _named(self, image: str) -> str:
        return folder_caption(self.root, image, repeats=True)

    def _captioned(self, image: str, file: str) -> Found:
        try:
            return Found(image, read_caption_file(self.root / file, self.data.caption_encoding))
        except BadCaptionError as error:
            return Found(image, reason=f"caption {file} {error}")
        except OSError as error:
            return Found(image, reason=f"caption {file}: {error.strerror}")

    def _from_tables(self, listing: Listing, tables: Mapping[Path, str]) -> list[Found]:
        columns = self.data.conditioning_columns or ()
        images = set(listing.images)
        found: list[Found] = []
        first: dict[str, Path] = {}
        for table, folder in tables.items():
            for entry in metadata.read_metadata(
                table,
                self.root,
                images,
                columns,
                folder=folder,
                encoding=self.data.caption_encoding,
                left_out=self.left_out,
            ):
                if entry.reason is None and (other := first.setdefault(entry.file, table)) != table:
                    where, named = (one.relative_to(self.root) for one in (table, other))
                    reason = f"{where}: names the image again, after {named}"
                    found.append(replace(entry, reason=reason))
                else:
                    found.append(entry)
        named_files = {entry.file for entry in found}
        named_files |= {file for entry in found for file in entry.conditioning}
        shown = [posixpath.join(folder, table.name) for table, folder in tables.items()]
        if len(shown) > 1:
            shown[0] = f"the {len(shown)} tables, such as {shown[0]},"
        found += [
            Found(image, reason=f"no row of {shown[0]} names it")
            for image in listing.images
            if image not in named_files
        ]
        bad_already = {entry.file for entry in listing.bad}
        return [entry for entry in found if entry.file not in bad_already]

    def _utf8_captions(self, found: Iterable[Found]) -> list[str]:
        """Describe captions that are read in another encoding, and may be UTF-8."""
        encoding = self.data.caption_encoding
        both = {
            entry.file: caption
            for entry in found
            for caption in entry.captions
            if is_utf8_as_well(caption, encoding)
        }
        if not both:
            return []
        return [
            f"{len(both)} captions in {self.root}, such as that of {min(both)}, are UTF-8 as well "
            f"as {encoding}, which data.caption_encoding names, and become "
            f"{both[min(both)][:SHOWN]!r}"
        ]

    def _unread(self, listing: Listing, tables: Mapping[Path, str]) -> list[str]:
        """Describe each kind of file that is present but not read."""
        notes = []
        if self.data.caption_strategy != "textfile" and listing.captions:
            notes.append(
                f"captions come from caption_strategy: {self.data.caption_strategy}; "
                f"{len(listing.captions)} *{self.data.caption_extension} files in {self.root} are "
                "not read"
            )
        if tables and listing.captions:
            notes.append(
                f"captions come from {next(iter(tables))}; {len(listing.captions)} "
                f"*{self.data.caption_extension} files in {self.root} are not read"
            )
        for key, labels in (
            ("mask_images", listing.masks), ("conditioning_images", listing.conditioning),
        ):  # fmt: skip
            folders = {os.path.realpath(Path(f).expanduser()) for f in self.data.other_folders}
            if labels and os.path.realpath(self.root) not in folders:
                notes.append(
                    f"{len(labels)} images in {self.root}, such as {min(labels.values())}, belong "
                    f"to the one next to them and are not read; `{key}: {self.data.images}` reads "
                    "them"
                )
        used = {*map(os.path.realpath, tables)}
        others = [
            name
            for name in listing.others
            if not used or os.path.realpath(self.root / name) not in used
        ]
        if others:
            files, are = ("files", "are") if len(others) > 1 else ("file", "is")
            notes.append(
                f"{len(others)} other {files} in {self.root}, such as {min(others)}, {are} not read"
            )
        return notes


def given_caption(data: ImageSourceConfig, image: str) -> str:
    """Return the caption of an image whose caption is not in a file."""
    if data.caption_strategy == "filename":
        return os.path.splitext(os.path.basename(image))[0].replace("_", " ").strip()
    if data.caption_strategy == "foldername":
        return folder_caption(root_of(data), image, repeats=data.folder_repeats)
    return str(data.instance_prompt)


def folder_files(data: ImageSourceConfig) -> list[str]:
    """List the paths of images, caption files or table, and conditioning images, sorted; see
    open.source_files."""
    root = root_of(data)
    listing = list_images(data)
    tables = find_tables(data, listing)
    own_files = data.caption_strategy == "textfile" and not tables
    names = [*listing.images, *listing.captions.values()] if own_files else listing.images
    paths = {os.path.join(root, name) for name in names}
    for folder in data.other_folders:
        place = Path(folder).expanduser()
        own = list_conditioning(data, folder)
        images = [*own.masks.values(), *own.conditioning.values(), *own.images]
        paths |= {os.path.join(place, name) for name in images}
    return sorted({*paths, *map(str, tables)})


def find_tables(data: ImageSourceConfig, listing: Listing) -> dict[Path, str]:
    """Return the metadata files, and the folder in data.images that the names of each start from.

    It is the configured one, or one in the folder. Tables in subfolders, as imagefolder has them,
    and metadata.LATER_NAMES count only without caption files.

    Args:
        data: The keys of a source.
        listing: The files of its folder.

    Raises:
        PipelineError: the configured one is missing, several may be meant, or columns of
            conditioning images have no table.
    """
    if data.caption_strategy != "textfile":
        return {}
    root = root_of(data)
    if data.metadata:
        return {configured_table(data.metadata): ""}
    later = () if listing.captions else metadata.LATER_NAMES
    tables: dict[Path, str] = {}
    if own := _choose_table(root, [n for n in (*metadata.NAMES, *later) if (root / n).is_file()]):
        tables[root / own] = ""
    elif not listing.captions:
        inner: dict[str, list[str]] = {}
        for file in sorted(listing.others):
            folder, _, name = file.rpartition("/")
            if name in (*metadata.NAMES, *metadata.LATER_NAMES):
                inner.setdefault(folder, []).append(name)
        for folder, names in inner.items():
            tables[root / folder / str(_choose_table(root / folder, names))] = folder
        splits = {SPLITS.get(part) for folder in inner for part in folder.split("/")} - {None}
        if len(splits) > 1:
            raise PipelineError(
                f"data.images: {root} has the splits {', '.join(inner)}",
                hint=f"name the folder of one: {root / max(inner)}",
            )
    if not tables and data.conditioning_columns:
        raise PipelineError(
            f"data.conditioning_columns: {', '.join(data.conditioning_columns)}: there is no table "
            f"with columns, neither data.metadata nor {' or '.join(metadata.NAMES)} in {root}",
            hint="set data.metadata to the table; or use data.conditioning_images",
        )
    return tables


def configured_table(named: str) -> Path:
    """Return the path of data.metadata.

    Raises:
        PipelineError: it is missing.
    """
    table = Path(named).expanduser()
    if not table.is_file():
        raise PipelineError(
            f"data.metadata: {table}: no such file",
            hint="correct data.metadata; relative paths count from where snakemake runs",
        )
    return table


def _choose_table(folder: Path, names: list[str]) -> str | None:
    """Return the table of a folder that counts, of those that it has."""
    chosen = [name for name in names if name in metadata.NAMES] or names
    if len(chosen) > 1:
        raise PipelineError(
            f"data.images: {folder} holds {' and '.join(sorted(chosen))}",
            hint="say which one counts with data.metadata, or remove the other",
        )
    return chosen[0] if chosen else None
