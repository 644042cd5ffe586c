"""What a key depends on, and what it does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from zerotrain.cache.keys import code_digest, latents_key, text_key

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
        text_key("a", parts=PARTS, dtype="fp32", code="c"),
        text_key("b", parts=PARTS, dtype="fp32", code="c"),
        text_key("a", parts={"vae": "2"}, dtype="fp32", code="c"),
        text_key("a", parts=PARTS, dtype="bf16", code="c"),
        text_key("a", parts=PARTS, dtype="fp32", code="d"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == key()


def module(folder: Path, text: str) -> ModuleType:
    """A module of that text."""
    file = folder / f"m{len(list(folder.iterdir()))}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def test_code_is_what_runs_not_how_it_is_written(tmp_path):
    plain = code_digest(module(tmp_path, "def f(x):\n    return x + 1\n"))
    noted = 'def f(x):\n    """Adds."""\n    # one\n    return (x +\n            1)\n'
    assert code_digest(module(tmp_path, '"""A module."""\n' + noted)) == plain
    assert code_digest(module(tmp_path, "def f(x):\n    return x + 2\n")) != plain
