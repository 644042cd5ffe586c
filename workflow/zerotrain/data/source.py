"""Sources of samples, images or text. The module is lightweight, as the Snakefile imports it."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact.documents import LeftOut
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

DIGITS = Path("data/digits.csv.gz")
"""The built-in example's scans."""
MOST_IMAGE_BYTES = 2**32
"""Size of the largest image file that is read: more than decoding's limit of pixels takes."""


class BadImageError(Exception):
    """An image that cannot be used; the text gives the reason, as part of a sentence."""


@dataclass(frozen=True)
class Found:
    """An image with its caption, or an entry of the source that is not a usable sample."""

    file: str
    """Name within the source, with forward slashes."""
    caption: str = ""
    reason: str | None = None
    """Why it cannot be used; None if there is no known reason before its pixels are read."""
    conditioning: tuple[str, ...] = ()
    """Its conditioning images, each named within the conditioning_source of its position."""
    repeats: int = 1
    """How often its source has it in an epoch."""
    other_captions: tuple[str, ...] = ()
    """More captions of it: those of a list, or lines (captions.edit_captions)."""
    mask: str | None = None
    """Its loss mask, named within mask_source."""

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions of it."""
        return (self.caption, *self.other_captions)


class Source(ABC):
    """Images and captions of one origin. Files are named within the source."""

    name: str
    """The source's name in messages."""
    notes: list[str]
    """Sentences that a user should know though nothing is wrong. Filled by found()."""
    left_out: LeftOut
    """Names in its tables and shards that are not used. Filled by found()."""

    @abstractmethod
    def found(self) -> list[Found]:
        """List all entries, good and bad, sorted by file, without reading pixels.

        Raises:
            PipelineError: the source is unusable as a whole.
        """

    def listed(self) -> list[Found]:
        """List the same as `found`; captions may be left unread, and be empty then.

        Raises:
            PipelineError: as `found`.
        """
        return self.found()

    @abstractmethod
    def read(self, file: str) -> bytes:
        """Read the bytes that identify an image.

        Raises:
            BadImageError: the file is too large for an image.
            OSError: it is unreadable.
        """

    @abstractmethod
    def decode(self, data: bytes, background: str | None = None) -> Image:
        """Decode the upright RGB image in the bytes, over white or another colour.

        Raises:
            BadImageError: they are not an image.
        """

    def conditioning_source(self, position: int) -> Source:
        """Return the source of the conditioning images at this position of every sample."""
        return self

    def path_of(self, file: str) -> str:
        """Return the path of an image, of a source whose images are files."""
        return os.path.join(self.name, file)

    def mask_source(self, file: str) -> Source:
        """Return the source of the mask of an image."""
        return self

    def sha256(self, file: str) -> str:
        """Compute the sha256 of an image's bytes."""
        return hashlib.sha256(self.read(file)).hexdigest()

    def image_of(self, file: str, image_sha256: str, background: str | None = None) -> Image:
        """Read an image as upright RGB, if it has not changed since prepare_dataset.

        Args:
            file: Its name.
            image_sha256: Digest of its bytes.
            background: The colour that it is put on; None for white.

        Raises:
            PipelineError: it is missing or unreadable, or has changed.
        """
        hint = "run snakemake again: it prepares the dataset again"
        try:
            data = self.read(file)
            if hashlib.sha256(data).hexdigest() != image_sha256:
                raise PipelineError(f"{self.name}: {file} changed since prepare_dataset", hint=hint)
            return self.decode(data, background)
        except (OSError, BadImageError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise PipelineError(f"{self.name}: {file}: {why}", hint=hint) from error


def exact_share(share: float) -> Fraction:
    """Return repeats as they were written: 0.1 is a tenth."""
    return Fraction(str(share))


def epoch_part(shares: Mapping[float, int]) -> int:
    """Count the samples that an epoch has of images with shares, of which so many have each."""
    found = round(sum(exact_share(share) * count for share, count in shares.items()))
    return max(1, found) if shares else 0


def count_epoch(repeats: NDArray[Any], shares: NDArray[Any], times: int) -> int:
    """Count the samples of an epoch: the train split with its repeats and the dataset's.

    Args:
        repeats: [N] repeats of each training sample.
        shares: [N] share of an epoch in which each takes part.
        times: Repeats of the dataset.
    """
    whole = int(repeats[shares == 1].sum()) * times
    return whole + epoch_part(Counter(shares[shares != 1].tolist()))
