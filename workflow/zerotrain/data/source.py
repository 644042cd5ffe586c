"""Where samples come from, images or text. This module is light: the Snakefile imports it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.config import DataConfig

DIGITS = Path("data/digits.csv.gz")
"""The built-in example's scans."""


class BadImage(Exception):
    """An image that cannot be used; the text says why, as part of a sentence."""


@dataclass(frozen=True)
class Found:
    """An image with its caption, or something in the source that is no usable sample."""

    file: str
    """Name within the source, with forward slashes."""
    caption: str = ""
    reason: str | None = None
    """Why it cannot be used; None if nothing is known against it before its pixels are read."""


class Source(ABC):
    """Images and captions of one origin. Files are named within the source."""

    name: str
    """How messages call the source."""
    pixel_modules: tuple[str, ...]
    """Modules whose code turns an image's bytes into pixels: an edit there makes latents stale."""
    notes: list[str]
    """What a user should know though nothing is wrong: one sentence each. Filled by found()."""

    @abstractmethod
    def found(self) -> list[Found]:
        """Everything that is there, good and bad, sorted by file; pixels are not read.

        Raises:
            PipelineError: the source as a whole cannot be used.
        """

    @abstractmethod
    def read(self, file: str) -> bytes:
        """The bytes that identify an image.

        Raises:
            OSError: they cannot be read.
        """

    @abstractmethod
    def decode(self, data: bytes) -> Image:
        """The upright RGB image that the bytes hold.

        Raises:
            BadImage: they hold none.
        """

    def sha256(self, file: str) -> str:
        """Sha256 of an image's bytes."""
        return hashlib.sha256(self.read(file)).hexdigest()

    def image(self, file: str) -> Image:
        """An image as upright RGB.

        Raises:
            PipelineError: it is gone or cannot be read.
        """
        return self._image(file, None)

    def image_of(self, file: str, image_sha256: str) -> Image:
        """An image as upright RGB, if it is still the one that prepare_dataset saw.

        Raises:
            PipelineError: it is gone, cannot be read, or has changed.
        """
        return self._image(file, image_sha256)

    def _image(self, file: str, image_sha256: str | None) -> Image:
        hint = "run snakemake again: it prepares the dataset anew"
        try:
            data = self.read(file)
            if image_sha256 and hashlib.sha256(data).hexdigest() != image_sha256:
                raise PipelineError(f"{self.name}: {file} changed since prepare_dataset", hint=hint)
            return self.decode(data)
        except (OSError, BadImage) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise PipelineError(f"{self.name}: {file}: {why}", hint=hint) from error


def open_source(data: DataConfig) -> Source:
    """The source that the configuration names."""
    if data.source == "digits":
        from zerotrain.data.digits import DigitsSource

        return DigitsSource()
    from zerotrain.data.folder import FolderSource

    return FolderSource(data)


def source_files(data: DataConfig) -> list[str]:
    """Every file that the dataset depends on (images, captions, tables, text), sorted.

    Snakemake takes them as inputs: editing or adding one reruns what depends on it. Nothing is
    opened, only listed.

    Raises:
        PipelineError: the folder or the metadata file is missing, or there is no image.
    """
    if data.source == "digits":
        return [str(DIGITS)] if DIGITS.is_file() else []
    if data.is_text:
        from zerotrain.data.text import text_files

        return text_files(data)
    from zerotrain.data.folder import folder_files

    return folder_files(data)
