"""The folder of an external checkpoint that a user's path refers to; without torch."""

from __future__ import annotations

import re
from pathlib import Path

WEIGHTS_SUFFIX = ".safetensors"
OPTIMIZERS = ("optimizer.bin", "optimizer.pt", "optimizer/optimizer.pt")
"""The optimizer's file of accelerate, of HF's Trainer and ai-toolkit, and of OneTrainer."""
OF_FOLDER = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model|adapter_model|pytorch_lora_weights)"
    r"([._-].*)?"
)
"""Names without extension of weights that programs write once in a folder."""
OF_BACKUP, BACKUP_RECORD = ("lora", "optimizer", "ema"), "meta.json"
"""Folders in a backup of OneTrainer, and the file next to them."""


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path refers to: for a file in a checkpoint's folder the folder.

    A safetensors file counts as weights of its own, unless its folder also has an optimizer's file,
    and it has the name that weights have in such a folder.
    """
    if not path.is_file():
        return path
    if path.parent.name in OF_BACKUP and (path.parent.parent / BACKUP_RECORD).is_file():
        return path.parent.parent
    of_folder = OF_FOLDER.fullmatch(path.stem) and optimizers_beside(path)
    return path if path.suffix == WEIGHTS_SUFFIX and not of_folder else path.parent


def optimizers_beside(path: Path) -> list[Path]:
    """List the optimizer's files in the folder of a file."""
    return [file for name in OPTIMIZERS if (file := path.parent / name).is_file()]
