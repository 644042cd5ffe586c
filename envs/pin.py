"""Write down the versions in use: constraints.txt from .venv, zerotrain.yaml from constraints.txt.

To move to other versions change or remove lines of constraints.txt, run `make test`, then
`.venv/bin/python envs/pin.py`.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
CONDA = Path(__file__).with_name("zerotrain.yaml")

CUDA = ("nvidia-", "cuda-", "triton")
"""What a CUDA build of torch brings is pinned by torch itself, and is absent from a CPU build."""

CONDA_HEAD = """\
# The same versions for conda, where Python and the compiler come from it. Generated from
# constraints.txt by envs/pin.py. In the project's folder:
#     conda env create -f envs/zerotrain.yaml && conda activate zerotrain
#     pip install --no-deps -e . && zerotrain build_ops
name: zerotrain
channels:
  - conda-forge
  - nodefaults
dependencies:
  - python=3.11
  - pip
  - make
  - cxx-compiler
  - pip:
"""


def pins(constraints: str) -> list[str]:
    """Return the lines of constraints.txt that pin a version."""
    return [line for line in constraints.splitlines() if line and not line.startswith("#")]


def installed() -> list[str]:
    """name==version of what pyproject.toml needs, directly or not; tools of one's own are left out.

    A local version suffix such as +cpu only names a build, so it is dropped.
    """
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    roots = [*project["dependencies"], *project["optional-dependencies"]["dev"], "setuptools"]
    waiting = [(Requirement(root), "") for root in roots]
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        key = (canonicalize_name(requirement.name), str(sorted(requirement.extras)))
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if key in seen or not needed or key[0].startswith(CUDA):
            continue
        seen.add(key)
        package = distribution(requirement.name)
        found[key[0]] = f"{package.metadata['Name']}=={package.version.partition('+')[0]}"
        for line in package.requires or []:
            waiting += [(Requirement(line), extra) for extra in ("", *requirement.extras)]
    return [found[name] for name in sorted(found)]


def conda(constraints: str) -> str:
    """Return the conda environment file with the pins of constraints.txt."""
    return CONDA_HEAD + "".join(f"      - {pin}\n" for pin in pins(constraints))


def main() -> None:
    """Write both files again; the comment at the head of constraints.txt stays."""
    old = CONSTRAINTS.read_text(encoding="utf-8")
    head = re.match(r"(#.*\n)*", old)
    text = (head[0] if head else "") + "\n".join(installed()) + "\n"
    CONSTRAINTS.write_text(text, encoding="utf-8")
    CONDA.write_text(conda(text), encoding="utf-8")


if __name__ == "__main__":
    main()
