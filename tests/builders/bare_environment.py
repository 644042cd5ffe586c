"""An environment as bare as the Python of a machine with a GPU and no network."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", site, *wheels.glob("*.whl")], check=True)
    root = Path(__file__).parents[2]
    return {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYTHONPATH": f"{site}:{root / 'workflow'}"}


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
