"""What a key depends on, and what it does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerotrain.artifact import Artifact, sources
from zerotrain.cache.code import IMAGES, TEXTS
from zerotrain.cache.encoding import CacheSettings, Encoding
from zerotrain.cache.keys import Encoder, conditioning_key, latents_key, text_key, tokens_key
from zerotrain.config.read import parse_config
from zerotrain.data.buckets import View, square_view
from zerotrain.data.dataset import Sample
from zerotrain.models.families.sdxl import FAMILY

ENCODER = Encoder("sdxl", {"vae": "1"}, "fp32", "cpu", "fp32")
IMAGE = ("a", square_view((0, 0, 8), 32), ENCODER)


def caption_key(encoder: Encoder = ENCODER, **changed: Any) -> str:
    """The key of embeddings, one thing changed."""
    return text_key("a", encoder, **{"max_sequence_length": None, **changed})


def test_all_that_the_user_decides_changes_the_key():
    """The kind of the device and the type in which is computed are part of it."""
    encoders = [
        ENCODER,
        replace(ENCODER, family="sd3"),
        replace(ENCODER, parts={"vae": "2"}),
        replace(ENCODER, parts={"vae": "1", "more": "1"}),
        replace(ENCODER, computed="bf16"),
        replace(ENCODER, device="cuda"),
        replace(ENCODER, dtype="bf16"),
        replace(ENCODER, pipeline="QwenImageEditPipeline"),
    ]
    keys = [
        *(latents_key(*IMAGE[:2], encoder) for encoder in encoders),
        *(conditioning_key("a", encoder) for encoder in encoders),
        *(caption_key(encoder) for encoder in encoders),
        latents_key("b", *IMAGE[1:]),
        latents_key("a", square_view((1, 0, 8), 32), ENCODER),
        latents_key("a", square_view((0, 0, 8), 64), ENCODER),
        latents_key("a", View((0, 0, 8, 4), (32, 16)), ENCODER),
        latents_key("a", View((0, 0, 8, 4), (64, 32)), ENCODER),
        latents_key("a", View((0, 0, 8, 4), (32, 32)), ENCODER),
        latents_key(*IMAGE, flipped=True),
        conditioning_key("b", ENCODER),
        text_key("b", ENCODER, max_sequence_length=None),
        caption_key(max_sequence_length=64),
        caption_key(long_captions="chunk"),
        caption_key(conditioning="a"),
        tokens_key("a", 32, family="causal_lm", parts={}),
        tokens_key("a", 64, family="causal_lm", parts={}),
        tokens_key("a", 32, family="seq2seq_lm", parts={}),
    ]
    assert len(set(keys)) == len(keys)
    assert latents_key(*IMAGE) == keys[0]


@pytest.fixture
def encode(tmp_path: Path, monkeypatch) -> Callable[..., tuple[Encoding, list[str]]]:
    """Call with a source to get what encodes it by the code in tmp_path, and two keys."""
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

    def make(**data: str) -> tuple[Encoding, list[str]]:
        for cached in vars(sources).values():
            getattr(cached, "cache_clear", int)()
        phases = [{"name": "p", "until": 1}]
        raw = {"run": "r", "base": "nano", "data": data, "phases": phases}
        encoding = Encoding(CacheSettings.of(parse_config(raw, "test")), 32, FAMILY, base)
        return encoding, [
            encoding.entry(sample, square_view(sample.crop, 32)).latents,
            encoding.text_key("a"),
        ]

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
        ("models/families/sdxl.py", "* vae.config", "/ vae.config", DIGITS, True, True),
        ("models/families/sdxl.py", "dim=1", "dim=0", DIGITS, False, False),
        (
            "models/families/pipelines.py",
            "safetensors=True",
            "safetensors=None",
            DIGITS,
            True,
            True,
        ),
    ],
)
def test_code_that_makes_other_numbers_is_recorded_and_no_part_of_the_keys(
    encode, file, old, new, data, latents, text
):
    """The code that a source's pixels, crops and embeddings pass through; comments aside."""
    before, keys = encode(**data)
    path = sources.PACKAGE / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    after, same_keys = encode(**data)
    moved = {name for name in before.code if before.code[name] != after.code[name]}
    assert moved == {name for name, differs in ((IMAGES, latents), (TEXTS, text)) if differs}
    assert keys == same_keys
