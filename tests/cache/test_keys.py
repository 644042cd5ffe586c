"""What a key depends on, and what it does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain import sources
from zerotrain.artifact import Artifact
from zerotrain.cache.encoding import Encoding
from zerotrain.cache.keys import latents_key, text_key
from zerotrain.config import parse_config
from zerotrain.data.dataset import Sample
from zerotrain.families.sdxl import FAMILY

PARTS = {"vae": "1"}


def key(
    image: str = "a",
    crop: tuple[int, int, int] = (0, 0, 8),
    resolution: int = 32,
    parts: dict[str, str] = PARTS,
    dtype: str = "fp32",
    code: str = "c",
) -> str:
    """The key of latents, one thing changed."""
    return latents_key(image, crop, resolution, parts=parts, dtype=dtype, code=code)


def caption_key(
    caption: str = "a",
    parts: dict[str, str] = PARTS,
    dtype: str = "fp32",
    code: str = "c",
    encoder_dtype: str = "fp32",
    max_sequence_length: int | None = None,
) -> str:
    """The key of embeddings, one thing changed."""
    return text_key(
        caption,
        parts=parts,
        dtype=dtype,
        code=code,
        encoder_dtype=encoder_dtype,
        max_sequence_length=max_sequence_length,
    )


def test_every_cause_of_other_numbers_changes_the_key():
    keys = [
        key(),
        key(image="b"),
        key(crop=(1, 0, 8)),
        key(resolution=64),
        key(parts={"vae": "2"}),
        key(parts={"vae": "1", "more": "1"}),
        key(dtype="bf16"),
        key(code="d"),
        caption_key(),
        caption_key(caption="b"),
        caption_key(parts={"vae": "2"}),
        caption_key(dtype="bf16"),
        caption_key(code="d"),
        caption_key(encoder_dtype="bf16"),
        caption_key(max_sequence_length=64),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == key()


@pytest.fixture
def keys(tmp_path: Path, monkeypatch) -> Callable[..., tuple[str, str]]:
    """Call with a source to get the keys of its latents and text by the code in tmp_path."""
    shutil.copytree(sources.PACKAGE, tmp_path / "zerotrain")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "zerotrain")
    parts = dict.fromkeys(FAMILY.parts + FAMILY.text_parts, "1")
    base = Artifact(tmp_path, "base", {"parts": parts}, {}, {}, {})
    sample = Sample(
        file="a",
        image_sha256="1",
        caption="a",
        caption_sha256="2",
        original_size=(32, 32),
        size=(32, 32),
        crop=(0, 0, 32),
        split="train",
    )

    def make(**data: str) -> tuple[str, str]:
        sources._code.cache_clear()
        phases = [{"name": "p", "until": 1}]
        raw = {"run": "r", "base": "nano", "data": data, "phases": phases}
        encoding = Encoding(parse_config(raw, "test"), 32, FAMILY, base)
        return encoding.entry(sample).latents, encoding.text_key("a")

    return make


DIGITS = {"source": "digits"}
FOLDER = {"images": "/images"}


@pytest.mark.parametrize(
    ("file", "old", "new", "data", "latents", "text"),
    [
        ("data/digits.py", "BICUBIC", "LANCZOS", DIGITS, True, False),
        ("data/digits.py", "BICUBIC", "LANCZOS", FOLDER, False, False),
        ("data/digits.py", "import Image\n\n", "import Image  # why\n\n", DIGITS, False, False),
        ("data/decode.py", "values / 257", "values / 256", FOLDER, True, False),
        ("data/crop.py", "127.5", "128", FOLDER, True, False),
        ("families/sdxl.py", "* vae.config", "/ vae.config", DIGITS, True, True),
        ("families/sdxl.py", "dim=1", "dim=0", DIGITS, False, False),
        ("families/pipelines.py", "safetensors=True", "safetensors=None", DIGITS, True, True),
    ],
)
def test_code_that_makes_other_numbers_changes_the_keys(keys, file, old, new, data, latents, text):
    """The code that a source's pixels, crops and embeddings pass through; comments aside."""
    before = keys(**data)
    path = sources.PACKAGE / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    after = keys(**data)
    assert (after[0] != before[0], after[1] != before[1]) == (latents, text)
