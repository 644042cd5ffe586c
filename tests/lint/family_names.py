"""`python -m tests.lint.family_names`: who knows a family by its name.

What differs between families is in their specs and modules, which the others ask; a name elsewhere
would have to be found by whoever adds a family. `make lint` runs this.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

from zerotrain.config.families import FAMILIES, LANGUAGE_MODELS

PACKAGE = Path(__file__).parents[2] / "workflow" / "zerotrain"
FOLDERS = ("config/families", "models/families", "importers")
"""Specs, modules, and other programs' names of the families."""
ALLOWED = {
    "export/formats/kohya.py": "kohya's names, which each of its scripts has of its own",
    "export/formats/ldm.py": "the original layouts",
    "export/formats/opening.py": "diffusers' reader that ignores SD3's names of kohya",
    "export/formats/original.py": "names in the original layouts",
    "launch/planner/shape.py": "images in the text encoders of two families",
    "models/base_places.py": "the one original layout that is read",
}


def check(package: Path = PACKAGE, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
    """Return a line for each name outside of the places for it, and for each idle allowance."""
    names = FAMILIES.keys() - {*LANGUAGE_MODELS}
    found, used = [], set()
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        if module.startswith(FOLDERS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in names:
                used.add(module)
                if module not in allowed:
                    found.append(f"{module}:{node.lineno}: {node.value}: ask its FamilySpec")
    return found + [f"{name}: knows no family: remove it from ALLOWED" for name in allowed
                    if name not in used]  # fmt: skip


if __name__ == "__main__":
    errors = check()
    print("\n".join(errors), file=sys.stderr)
    sys.exit(bool(errors))
