"""The built-in example: 1,797 scanned handwritten digits.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998. They are in data/digits.csv.gz, a copy of scikit-learn's file, and outside the
project in scikit-learn itself; other bytes are refused. Images are identified by their 8 x 8 grey
pixels.
"""

from __future__ import annotations

import gzip
import hashlib
from errno import ENOENT
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from zerotrain.artifact.documents import LeftOut
from zerotrain.data.source import DIGITS, Found, Source
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from PIL.Image import Image

MD5 = "9b335364a7bfd63947c7480a5bd51f2d"
"""md5 of the compressed file, as in data/digits.csv.gz.dvc."""
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SCAN_SIDE = 8
IMAGE_SIDE = 32
"""Side of the served images: a model conditioned on 8-pixel images, as SDXL is conditioned on
original sizes, would have to be asked for 8-pixel images forever."""


class DigitsSource(Source):
    """White digits on black, one file name per scan, captioned in words."""

    name = "digits"

    def __init__(self) -> None:
        self.notes, self.left_out = [], LeftOut()

    def found(self) -> list[Found]:
        """List all scans in the file's order, which is also the order of their names."""
        return [
            Found(file, f"a handwritten digit {NAMES[digit]}")
            for file, (_, digit) in _scans().items()
        ]

    def read(self, file: str) -> bytes:
        """Return the 64 grey bytes of a scan, row by row."""
        if file not in _scans():
            raise FileNotFoundError(ENOENT, "no such scan", file)
        return _scans()[file][0]

    def decode(self, data: bytes, background: str | None = None) -> Image:
        """Scale a scan to RGB, 32 x 32; it is opaque."""
        from PIL import Image

        scan = Image.frombytes("L", (SCAN_SIDE, SCAN_SIDE), data)
        return scan.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC).convert("RGB")


def digits_file() -> Path:
    """Return the project's file, else scikit-learn's."""
    if DIGITS.is_file():
        return DIGITS
    import sklearn

    return Path(sklearn.__file__).parent / "datasets" / "data" / DIGITS.name


@cache
def _scans() -> dict[str, tuple[bytes, int]]:
    """Read the grey bytes and the digit of each scan.

    Each line of the file has 64 ink values from 0 to 16, and the digit.
    """
    import numpy as np

    path = digits_file()
    packed = path.read_bytes()
    if (found := hashlib.md5(packed, usedforsecurity=False).hexdigest()) != MD5:
        raise PipelineError(
            f"{path}: md5 {found}, the example's scans have {MD5}",
            hint=f"`git checkout -- {DIGITS}`; outside the project: the scikit-learn of "
            "envs/constraints.txt",
        )
    lines = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",")
    grey = np.round(lines[:, :-1] * (255 / 16)).astype(np.uint8)
    return {
        f"scan-{index:04d}": (scan.tobytes(), int(digit))
        for index, (scan, digit) in enumerate(zip(grey, lines[:, -1], strict=True))
    }
