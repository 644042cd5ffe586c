"""Code and commands of pages, as a user runs them."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from zerotrain import cli


def run_code(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the code makes inside the folder: pixels of image.png, or the text that it prints."""
    monkeypatch.chdir(folder)
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "snippet", "exec"), {})
    image = folder / "image.png"
    return Image.open(image).tobytes() if image.exists() else printed.getvalue().strip()


def join_lines(code: str) -> str:
    """Code without line breaks, which depend on a prompt's length."""
    return "".join(code.split()).replace(",)", ")")


def code_of(page: str) -> str:
    """The Python of a README."""
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return code


PROMPT = "a red house"
SETTINGS = ("--steps", 2, "--guidance", 3.0)


def run_command(command: str, *words: object, progress: bool = True) -> str:
    """What the command prints, with or without its progress, or the message with which it ends."""
    result = CliRunner().invoke(cli.command_line(), [command, *map(str, words)])
    if result.exception is not None:
        return str(result.exception)
    return result.output if progress else result.stdout


run_sample = partial(run_command, "sample")


def sample_images(weights: Path, out: Path, *words: object) -> list[bytes]:
    """Pixels of what the command writes, from seed 7 on."""
    said = run_sample(weights, PROMPT, "--seed", 7, *SETTINGS, "--out", out, *words)
    files = [Path(line.removeprefix("wrote ")) for line in said.splitlines() if "wrote" in line]
    assert files, said
    return [Image.open(file).tobytes() for file in files]


def distance(one: bytes, other: bytes) -> int:
    """Largest difference of two images, of 255."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
