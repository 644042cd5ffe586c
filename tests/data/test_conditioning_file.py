"""Files of conditioning images: which alpha is refused."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path

import pytest
from PIL import Image

from zerotrain.data.conditioning import check_opaque, read_conditioning_images
from zerotrain.data.source import BadImageError
from zerotrain.errors import PipelineError


def encoded(mode: str, colour: object, **options: object) -> bytes:
    """The bytes of a PNG of one colour."""
    stream = io.BytesIO()
    image = Image.new(mode, (2, 2), colour)  # type: ignore[arg-type]
    if mode == "P":
        image.putpalette(range(15))
    image.save(stream, "PNG", **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "transparent"),
    [
        (encoded("RGBA", (255, 255, 255, 0)), True),
        (encoded("LA", (9, 254)), True),
        (encoded("P", 3, transparency=3), True),
        (encoded("P", 3, transparency=2), False),
        (encoded("RGBA", (1, 2, 3, 255)), False),
        (encoded("RGB", (1, 2, 3)), False),
        (encoded("I;16", 300), False),
    ],
    ids=["clear", "almost opaque", "clear index", "other index", "opaque", "no alpha", "16 bits"],
)
def test_one_pixel_that_is_not_opaque_is_refused(data: bytes, transparent: bool) -> None:
    """In each form that a PNG has for it."""
    with pytest.raises(BadImageError) if transparent else nullcontext():
        check_opaque(data)


def test_files_next_to_prompts_are_held_to_the_same(tmp_path: Path) -> None:
    """As those of a dataset."""
    (tmp_path / "mask.png").write_bytes(encoded("LA", (255, 0)))
    with pytest.raises(PipelineError, match=r"--image: .*mask\.png: has transparent pixels; save"):
        read_conditioning_images([tmp_path / "mask.png"], "--image")
