"""A folder of images, with a caption file next to each, a table of captions, or one for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.artifact.documents import DocumentError, LeftOut, read_bytes
from zerotrain.config.image_options import WHITE
from zerotrain.data import metadata
from zerotrain.data.caption_file import (
    BadCaptionError,
    folder_caption,
    read_caption_file,
    repeat_as_named,
)
from zerotrain.data.conditioning import MASK, ConditioningFolders
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


class FolderSource(Source):
    """Images of a folder and its subfolders, identified by the bytes of their files.

    Args:
        data: The section `data` of the configuration.
        root: A folder to read from instead of data.images.
    """

    pixel_modules = ("zerotrain.data.decode",)

    def __init__(self, data: ImageSourceConfig, root: Path | None = None) -> None:
        self.data = data
        self.root = root or root_of(data)
        self.name = str(self.root)
        self.notes, self.left_out = [], LeftOut()

    def found(self) -> list[Found]:
        """List images with their captions, and all bad entries, sorted by file."""
        return self._found(self._captioned)

    def listed(self) -> list[Found]:
        """List the same as `found`, without reading caption files next to images."""
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
        table = find_table(self.data, captioned=bool(listing.captions))
        self.notes, self.left_out = self._unread(listing, table), LeftOut()
        if table:
            found = self._from_table(listing, table)
        else:
            found = [*self._from_files(listing, read_caption)]
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
            return Found(image, read_caption_file(self.root / file))
        except BadCaptionError as error:
            return Found(image, reason=f"caption {file} {error}")
        except OSError as error:
            return Found(image, reason=f"caption {file}: {error.strerror}")

    def _from_table(self, listing: Listing, table: Path) -> list[Found]:
        columns = self.data.conditioning_columns or ()
        images = set(listing.images)
        found = metadata.read_metadata(table, self.root, images, columns, self.left_out)
        named = {entry.file for entry in found}
        named |= {file for entry in found for file in entry.conditioning}
        found += [
            Found(image, reason=f"no row of {table.name} names it")
            for image in listing.images
            if image not in named
        ]
        bad_already = {entry.file for entry in listing.bad}
        return [entry for entry in found if entry.file not in bad_already]

    def _unread(self, listing: Listing, table: Path | None) -> list[str]:
        """Describe each kind of file that is present but not read."""
        notes = []
        if self.data.caption_strategy != "textfile" and listing.captions:
            notes.append(
                f"captions come from caption_strategy: {self.data.caption_strategy}; "
                f"{len(listing.captions)} *{self.data.caption_extension} files in {self.root} are "
                "not read"
            )
        if table and listing.captions:
            notes.append(
                f"captions come from {table}; {len(listing.captions)} "
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
    table = find_table(data, captioned=bool(listing.captions))
    own_files = data.caption_strategy == "textfile" and not table
    names = [*listing.images, *listing.captions.values()] if own_files else listing.images
    paths = {os.path.join(root, name) for name in names}
    for folder in data.other_folders:
        place = Path(folder).expanduser()
        own = list_conditioning(data, folder)
        images = [*own.masks.values(), *own.conditioning.values(), *own.images]
        paths |= {os.path.join(place, name) for name in images}
    return sorted({*paths, str(table)} if table else paths)


def incomplete(data: ImageSourceConfig) -> tuple[list[Found], list[Found]]:
    """List the images without a caption or conditioning images, with the reason, and the others.

    No image and no caption file is opened.

    Raises:
        PipelineError: as FolderSource.found.
    """
    images = {*list_images(data).images}
    listed = [entry for entry in FolderSource(data).listed() if entry.file in images]
    whole = {entry.file: entry for entry in listed if entry.reason is None}
    lacking = {entry.file: entry for entry in listed if entry.file not in whole}
    return [*lacking.values()], [*whole.values()]


def find_table(data: ImageSourceConfig, *, captioned: bool) -> Path | None:
    """Return the metadata file: the configured one, or one in the folder.

    Args:
        data: The keys of a source.
        captioned: Whether the folder has caption files: they go before metadata.parquet and
            metadata.json.
    """
    if data.caption_strategy != "textfile":
        return None
    if data.metadata:
        table = Path(data.metadata).expanduser()
        if not table.is_file():
            raise PipelineError(
                f"data.metadata: {table}: no such file",
                hint="correct data.metadata; relative paths count from where snakemake runs",
            )
        return table
    later = () if captioned else metadata.LATER_NAMES
    named = [path for name in (*metadata.NAMES, *later) if (path := root_of(data) / name).is_file()]
    inside = [path for path in named if path.name in metadata.NAMES] or named
    if len(inside) > 1:
        raise PipelineError(
            f"data.images: {root_of(data)} holds {' and '.join(path.name for path in inside)}",
            hint="say which one counts with data.metadata, or remove the other",
        )
    if not inside and data.conditioning_columns:
        raise PipelineError(
            f"data.conditioning_columns: {', '.join(data.conditioning_columns)}: there is no table "
            f"with columns, neither data.metadata nor {' or '.join(metadata.NAMES)} in "
            f"{root_of(data)}",
            hint="set data.metadata to the table; or use data.conditioning_images",
        )
    return inside[0] if inside else None
