"""The built-in example: 1,797 scanned handwritten digits that ship inside scikit-learn.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998. No file is written: images are made from the package's data, and identified by
their 8 x 8 grey pixels.
"""

from __future__ import annotations

from errno import ENOENT
from functools import cache
from typing import TYPE_CHECKING

from zerotrain.data.source import Found, Source

if TYPE_CHECKING:
    from PIL.Image import Image

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SCAN_SIDE = 8
IMAGE_SIDE = 32
"""Scans are served at this size: a model told that its images are 8 pixels wide, as SDXL is told
original sizes, would have to be asked for 8-pixel images ever after."""


class DigitsSource(Source):
    """White digits on black, one file name for each scan, captioned in words."""

    name = "digits"
    pixel_modules = ("zerotrain.data.digits",)

    def __init__(self) -> None:
        self.notes = []

    def found(self) -> list[Found]:
        """All scans in the package's order, which is that of their names."""
        return [
            Found(file, f"a handwritten digit {NAMES[digit]}")
            for file, (_, digit) in _scans().items()
        ]

    def read(self, file: str) -> bytes:
        """The 64 grey bytes of a scan, row by row."""
        if file not in _scans():
            raise FileNotFoundError(ENOENT, "no such scan", file)
        return _scans()[file][0]

    def decode(self, data: bytes) -> Image:
        """The scan as RGB, 32 x 32."""
        from PIL import Image

        scan = Image.frombytes("L", (SCAN_SIDE, SCAN_SIDE), data)
        return scan.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC).convert("RGB")


@cache
def _scans() -> dict[str, tuple[bytes, int]]:
    """Grey bytes and digit of each scan; scikit-learn counts ink from 0 to 16."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return {
        f"scan-{index:04d}": (scan.tobytes(), int(digit))
        for index, (scan, digit) in enumerate(zip(grey, digits.target, strict=True))
    }
