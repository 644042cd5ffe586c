"""Pin all packages by version and hash: constraints.txt and cuda.txt from pyproject.toml.

    .venv/bin/python envs/pin.py                   # what is pinned keeps its version
    .venv/bin/python envs/pin.py diffusers peft    # the newest versions of these

uv resolves for all systems and Pythons at once, and asks the package index for the hashes of all
files of a version. Then `make test`: set-up installs what has changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import setup

ROOT = Path(__file__).parents[1]
ENVS = Path(__file__).parent
CONSTRAINTS, CUDA = ENVS / "constraints.txt", ENVS / "cuda.txt"

BROUGHT_BY_CUDA = ("nvidia-", "cuda-", "triton")
"""Packages that torch's CUDA build needs, and its CPU build does not."""


def pins(text: str) -> list[str]:
    """Return the lines that pin a package: `name==version ; condition --hash=... --hash=...`."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def resolve(pinned: list[str], upgraded: list[str]) -> list[str]:
    """Return a line for each package that pyproject.toml needs, directly or not.

    Only the package index counts, not the folders and further indexes of pip's settings: these may
    hold another build of the same version.
    """
    own = ("UV_FIND_LINKS", "UV_INDEX")
    found = {**os.environ, **setup.uv_settings(setup.pip_settings(sys.executable))}
    environment = {name: value for name, value in found.items() if name not in own}
    with tempfile.TemporaryDirectory() as name:
        roots, output = Path(name) / "roots.in", Path(name) / "pins.txt"
        roots.write_text("setuptools\n", encoding="utf-8")
        output.write_text("\n".join(line.split(" --hash")[0] for line in pinned), encoding="utf-8")
        options = ["--universal", "--python-version", ".".join(map(str, setup.OLDEST))]
        options += ["--extra", "dev", "--generate-hashes", "--no-annotate", "--no-header", "-q"]
        options += [f"--upgrade-package={package}" for package in upgraded]
        # deepspeed says what it needs only where torch is installed.
        options += ["--no-build-isolation", "--python", sys.executable, "--output-file", output]
        command = [Path(sys.executable).with_name("uv"), "pip", "compile", *options]
        subprocess.run([*command, ROOT / "pyproject.toml", roots], env=environment, check=True)
        return pins(output.read_text(encoding="utf-8").replace(" \\\n   ", ""))


def torch_hashes(version: str, old: list[str]) -> list[str]:
    """Return the hashes of torch's builds that are on no index but PyTorch's own.

    Those that are pinned stay while the version does; the files in the folders where pip looks on
    this machine are added.
    """
    same = [line for line in old if line.startswith(f"torch=={version} ")]
    kept = re.findall(r"--hash=sha256:\w+", " ".join(same))
    folders = setup.pip_settings(sys.executable).get("find-links", "").split()
    files = [file for folder in folders for file in Path(folder).glob(f"torch-{version}+*.whl")]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return [*kept, *(f"--hash=sha256:{digest}" for digest in digests)]


def with_hashes(line: str, more: list[str]) -> str:
    """Return a pin with further hashes, each once."""
    pin, *hashes = line.split(" --hash=")
    return " ".join([pin, *sorted({*(f"--hash={each}" for each in hashes), *more})])


def write(file: Path, lines: list[str]) -> None:
    """Write the pins under the comment at the head of the file."""
    head = re.match(r"(#.*\n)*", file.read_text(encoding="utf-8"))
    file.write_text((head[0] if head else "") + "\n".join(lines) + "\n", encoding="utf-8")


def main(upgraded: list[str]) -> None:
    """Resolve, and write both files."""
    old = [line for file in (CONSTRAINTS, CUDA) for line in pins(file.read_text(encoding="utf-8"))]
    lines = resolve(old, upgraded)
    lines = [
        with_hashes(line, torch_hashes(setup.version(line), old))
        if line.startswith("torch==")
        else line
        for line in lines
    ]
    write(CUDA, [line for line in lines if line.startswith(BROUGHT_BY_CUDA)])
    write(CONSTRAINTS, [line for line in lines if not line.startswith(BROUGHT_BY_CUDA)])


if __name__ == "__main__":
    main(sys.argv[1:])
