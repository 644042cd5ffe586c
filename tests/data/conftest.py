"""Small image folders."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from zerotrain.config.data import DataConfig
from zerotrain.data.open import open_source
from zerotrain.data.source import Found

MakeImages = Callable[..., Path]


def png(colour: tuple[int, int, int] = (200, 30, 60), size: tuple[int, int] = (12, 10)) -> bytes:
    """The bytes of a PNG of one colour."""
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def images(tmp_path: Path) -> MakeImages:
    """Call with image names and captions to get a folder; a caption of None is not written."""

    def make(**captions: str | None) -> Path:
        folder = tmp_path / "images"
        folder.mkdir(exist_ok=True)
        for number, (name, caption) in enumerate(captions.items()):
            (folder / f"{name}.png").write_bytes(png((number, 100, 50)))
            if caption is not None:
                (folder / f"{name}.txt").write_text(caption)
        return folder

    return make


@pytest.fixture
def found() -> Callable[..., dict[str, Found]]:
    """Call with a folder and data options to get what is found, by file."""

    def find(folder: Path, **options: object) -> dict[str, Found]:
        data = DataConfig.model_validate({"images": str(folder), **options})
        return {entry.file: entry for entry in open_source(data).found()}

    return find
