"""The files in a folder of images, without opening any."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.data.source import Found
from zerotrain.data.table import printable
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.config.image_source import ImageSourceConfig

EXTENSIONS = (
    *(".apng", ".avif", ".bmp", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".jpx", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".psd", ".qoi", ".tga", ".tif", ".tiff"),
    ".webp",
    # Pillow reads none of these; they are listed so that they are reported as bad samples.
    *(".cr2", ".cr3", ".dng", ".heic", ".heif", ".jxl", ".nef", ".svg"),
)
"""Files with these extensions, in any case, count as images. Hidden files never do."""

LABELS = {"-masklabel": "masks", "-condlabel": "conditioning"}
"""Ends of the names of images that belong to the one next to them, as OneTrainer's."""
NOTES = re.compile(r"(readme|licen[cs]e|notice|credits|changelog)([._-]\w+)*", re.IGNORECASE)
"""Names without extension of texts about a folder."""
NOT_UTF8 = "its name is not UTF-8"


@dataclass
class Listing:
    """The files in an image folder, unordered; names are relative, with forward slashes."""

    images: list[str] = field(default_factory=list)
    captions: dict[str, str] = field(default_factory=dict)
    """Caption files by name without extension, which is the beginning of the image's name."""
    bad: list[Found] = field(default_factory=list)
    """What is not read: links that lead out, names that no manifest can hold, what is no file."""
    others: list[str] = field(default_factory=list)
    masks: dict[str, str] = field(default_factory=dict)
    """Masks next to their images, by the name of the image without extension."""
    conditioning: dict[str, str] = field(default_factory=dict)
    """Conditioning images next to their images, likewise."""


def list_images(data: ImageSourceConfig) -> Listing:
    """List data.images with its subfolders, except for folders of conditioning images or masks.

    Raises:
        PipelineError: it is missing, is not a folder, is unreadable, or has no image.
    """
    return _list(root_of(data), data, "data.images")


def list_conditioning(data: ImageSourceConfig, folder: str) -> Listing:
    """List a folder of data.conditioning_images, or of data.mask_images, with its subfolders.

    Raises:
        PipelineError: as list_images.
    """
    key = "mask_images" if folder == data.mask_images else "conditioning_images"
    return _list(Path(folder).expanduser(), data, f"data.{key}")


def root_of(data: ImageSourceConfig) -> Path:
    """Return the folder of data.images."""
    return Path(data.images or "").expanduser()


def check_usable_path(path: Path, key: str) -> None:
    """Check that a path can be printed and stored.

    Raises:
        PipelineError: it is not UTF-8.
    """
    if printable(str(path)) != str(path):
        raise _unusable(path, key, NOT_UTF8)


def _list(root: Path, data: ImageSourceConfig, key: str) -> Listing:
    listing = Listing()
    try:
        _scan(root, data, listing)
    except FileNotFoundError as error:
        raise _unusable(root, key, "no such folder") from error
    except NotADirectoryError as error:
        raise _unusable(root, key, "a file, not a folder") from error
    except OSError as error:
        raise _unusable(root, key, f"{error.filename}: {error.strerror}") from error
    _set_labels_apart(listing)
    if not listing.images and not listing.bad:
        seen = [*listing.captions.values(), *listing.others]
        shown = f"; it holds {len(seen)} other files, such as {min(seen)}" if seen else ""
        raise _unusable(root, key, f"no image in it or its subfolders{shown}")
    return listing


def _set_labels_apart(listing: Listing) -> None:
    """Take masks and conditioning images from the images, and notes from the captions."""
    stems = {os.path.splitext(image)[0] for image in listing.images}
    plain = []
    for image in listing.images:
        stem = os.path.splitext(image)[0]
        end = next((end for end in LABELS if stem.endswith(end)), "")
        if end and (own := stem.removesuffix(end)) in stems:
            getattr(listing, LABELS[end])[own] = image
        else:
            plain.append(image)
    listing.images = plain
    for stem, file in [*listing.captions.items()]:
        if stem not in stems and NOTES.fullmatch(os.path.basename(stem)):
            del listing.captions[stem]
            listing.others.append(file)


def _scan(root: Path, data: ImageSourceConfig, listing: Listing) -> None:
    extension = data.caption_extension.lower()
    real_root = os.path.realpath(root)
    # A folder of images may contain one of conditioning images or masks, or be inside it.
    roots = [root_of(data), *(Path(name).expanduser() for name in data.other_folders)]
    waiting, seen = [""], {real_root, *map(os.path.realpath, roots)}
    while waiting:
        folder = waiting.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                name = folder + entry.name
                if entry.name.startswith("."):
                    continue
                if printable(entry.name) != entry.name:
                    listing.bad.append(Found(printable(name), reason=NOT_UTF8))
                    continue
                if entry.is_symlink() and not data.follow_symlinks:
                    target = os.path.realpath(entry.path)
                    if os.path.isdir(target) or not target.startswith(real_root + os.sep):
                        listing.bad.append(Found(name, reason=_refused_link(target)))
                        continue
                # DirEntry raises for a link to itself, os.path does not; only links cost a call.
                linked = entry.is_symlink()
                if os.path.isdir(entry.path) if linked else entry.is_dir():
                    real = os.path.realpath(entry.path)
                    if real not in seen:
                        seen.add(real)
                        waiting.append(name + "/")
                elif not name.lower().endswith((extension, *EXTENSIONS)):
                    listing.others.append(name)
                elif not (os.path.isfile(entry.path) if linked else entry.is_file()):
                    listing.bad.append(Found(name, reason=_no_file(entry.path)))
                elif name.lower().endswith(extension):
                    listing.captions[name[: -len(extension)]] = name
                else:
                    listing.images.append(name)


def _no_file(path: str) -> str:
    """Say why something with the name of an image or a caption is no regular file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return f"a link to {printable(os.readlink(path))}, which does not exist"
    except OSError as error:
        return f"a link that cannot be followed ({error.strerror})"
    kinds = {stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    kind = next((name for is_one, name in kinds.items() if is_one(mode)), "a device")
    return f"{kind}, not a file"


def _refused_link(target: str) -> str:
    kind = "a link to a folder" if os.path.isdir(target) else "a link that leads out of the folder"
    return f"{kind}, to {printable(target)} (data.follow_symlinks: true would take it)"


def _unusable(path: Path, key: str, why: str) -> PipelineError:
    return PipelineError(
        f"{key}: {path}: {why}",
        hint="give a folder with images (.png, .jpg, .webp, ...); relative paths count from "
        "where snakemake runs",
    )
