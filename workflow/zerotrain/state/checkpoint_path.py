"""The folder of an external checkpoint that a user's path refers to; without torch."""

from __future__ import annotations

from pathlib import Path

WEIGHTS_SUFFIX = ".safetensors"
OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
"""The optimizer's file of accelerate, and of HF's Trainer."""


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path refers to: for a file in a checkpoint's folder the folder.

    A safetensors file counts as weights alone, unless its folder also has an optimizer's file.
    """
    if not path.is_file():
        return path
    if path.suffix == WEIGHTS_SUFFIX and not any((path.parent / n).is_file() for n in OPTIMIZERS):
        return path
    return path.parent
