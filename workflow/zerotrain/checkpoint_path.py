"""The folder that a user means by the path of an external checkpoint; without torch."""

from __future__ import annotations

from pathlib import Path

WEIGHTS_SUFFIX = ".safetensors"
OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
"""accelerate's name of the optimizer's file, and that of HF's Trainer."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint of a path: a file of a checkpoint's folder stands for the folder.

    A safetensors file is weights alone, unless its folder has an optimizer's file too.
    """
    if not path.is_file():
        return path
    if path.suffix == WEIGHTS_SUFFIX and not any((path.parent / n).is_file() for n in OPTIMIZERS):
        return path
    return path.parent
