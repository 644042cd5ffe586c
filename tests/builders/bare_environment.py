"""An environment as bare as the Python of a machine with a GPU and no network."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from zerotrain.machine import compiled_ops

OF_THE_MACHINE = ("torch", "transformers", "accelerate", "peft", "pyarrow", "typer", "ninja")
"""What benchmarks/gpu_wheels.sh takes for granted, with what these need."""


def make_bare_environment(folder: Path, wheels: Path) -> dict[str, str]:
    """Make an environment of the machine's packages and the wheels; return its variables.

    The machine's packages are links to those of this environment.
    """
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in needed(OF_THE_MACHINE):
        for file in distribution(name).files or []:
            top = file.parts[0]
            target = packages / top if top != ".." else folder / "bin" / file.name
            if top == ".." and file.parts[-2] != "bin":
                continue
            source = distribution(name).locate_file(top if top != ".." else file)
            if not target.exists() and Path(str(source)).exists():
                target.symlink_to(Path(str(source)).resolve())
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", site, *wheels.glob("*.whl")], check=True)
    root = Path(__file__).parents[2]
    return {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYTHONPATH": f"{site}:{root / 'workflow'}"}


COMPILER = """#!/bin/sh
# The object that set-up compiled from an equal source, or what the compiler makes.
for word; do
    case $before in -o) made=$word ;; -c) source=$word ;; esac
    before=$word
done
kept={ops}/$(basename "$PWD")/$made
if [ -z "$source" ] || ! [ -f "$kept" ]; then exec {compiler} "$@"; fi
cp "$kept" "$made"
echo "$made: $source" >"$made.d"
"""


def reuse_compiled_ops(folder: Path) -> None:
    """Let the environment's compiler take the objects of this environment's ops.

    To compile them takes two minutes. The wheel's sources and headers are equal to those that they
    were made of.
    """
    ours = Path(str(distribution("deepspeed").locate_file("deepspeed/ops/csrc")))
    theirs = folder / "site/deepspeed/ops/csrc"
    sources = [path.relative_to(ours) for path in ours.rglob("*") if path.is_file()]
    equal, *others = filecmp.cmpfiles(ours, theirs, map(str, sources), shallow=False)
    assert equal
    assert others == [[], []]
    script = folder / "bin/c++"
    found = filter(None, map(shutil.which, ("c++", "g++", "clang++")))
    text = COMPILER.format(ops=compiled_ops.ops_folder(), compiler=next(found))
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)


def needed(roots: tuple[str, ...]) -> set[str]:
    """Names of packages and of all that they need."""
    waiting = list(roots)
    found: set[str] = set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            lines = [Requirement(line) for line in distribution(name).requires or []]
            waiting += [
                line.name
                for line in lines
                if not line.marker or line.marker.evaluate({"extra": ""})
            ]
    return found
