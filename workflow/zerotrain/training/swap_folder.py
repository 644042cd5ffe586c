"""Swap folders on a fast disk: each training has its own, and clears those of dead ones.

<offload_path>/zerotrain-<run>-<phase>-<token>/
    owner.json   the process that answers for the training (zerotrain.training.holder.Holder)
    ...          what DeepSpeed swaps out

DeepSpeed names its files alike in every training and removes none: two trainings of one path would
read each other's weights, and a killed one leaves hundreds of gigabytes behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from zerotrain.artifact import Artifact
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import disk
from zerotrain.model_sizes import read_sizes
from zerotrain.training.holder import Holder, this_process

PREFIX = "zerotrain-"
OWNER = "owner.json"
OPTIMIZER_BYTES = 16
"""Of a trained parameter: float32 master weight, Adam's two moments and the gradient."""
WEIGHT_BYTES = {"no": 4, "bf16": 2, "fp16": 2}
"""Of every parameter, by precision."""


def swaps(phase: ResolvedPhase) -> bool:
    """Whether anything of the phase is swapped to a disk."""
    return "nvme" in (phase.offload_optimizer, phase.offload_param)


@contextlib.contextmanager
def swap_folder(phase: ResolvedPhase, needed_bytes: int) -> Iterator[tuple[Path, list[str]]]:
    """A folder for one training's swapped tensors, removed at the end.

    Args:
        phase: The phase; its offload_path names the disk.
        needed_bytes: What the training will write there.

    Yields:
        The folder, and sentences for the user: what was cleared, and what was left alone.

    Raises:
        PipelineError: offload_path is no folder, cannot be written, lies in memory, or has too
            little space.
    """
    path = disk.on_this_machine(phase.offload_path or "", "launch.offload_path")
    disk.check_folder(path, phase.phase)
    said = clear_dead(path)
    check_disk(phase, needed_bytes)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{phase.run}-{phase.phase}-", dir=path))
    try:
        draft = folder / f".{OWNER}.new"
        draft.write_text(json.dumps(asdict(this_process())) + "\n")
        draft.replace(folder / OWNER)
        yield folder, said
    finally:
        _remove(folder)


def check_disk(phase: ResolvedPhase, needed_bytes: int) -> None:
    """Refuse an offload_path that cannot hold what the phase swaps.

    Raises:
        PipelineError: it is no folder, cannot be written, lies in memory, or has too little space.
    """
    path = Path(os.path.expandvars(phase.offload_path or ""))
    disk.check_folder(path, phase.phase)
    weight = WEIGHT_BYTES[phase.mixed_precision]
    why = f"{OPTIMIZER_BYTES} bytes a trained parameter, {weight} a parameter"
    disk.check_space(path, phase.phase, needed_bytes, why)


def clear_dead(path: Path) -> list[str]:
    """Remove the swap folders whose owner is dead, whichever phase they served.

    A living owner's folder stays, and so does one of another host, of which nothing is known here.

    Returns:
        A sentence for each folder that was removed, or that names no owner and was left alone.
    """
    said: list[str] = []
    for folder in sorted(path.glob(f"{PREFIX}*")):
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            owner = Holder(**json.loads((folder / OWNER).read_text()))
            dead = not owner.lives()
        except FileNotFoundError:
            if not folder.exists():  # its own training, or another start, has just removed it
                continue
            said.append(_unowned(folder, "is missing"))
            continue
        except (OSError, ValueError, TypeError):
            said.append(_unowned(folder, "cannot be read"))
            continue
        if dead:
            size = _size(folder)
            _remove(folder)
            said.append(
                f"{folder}: swap files of a training that has died (pid {owner.pid}) removed, "
                f"{disk.size(size)}"
            )
    return said


def needed_bytes(phase: ResolvedPhase, base: Artifact, where: str = "nvme") -> int:
    """What a training of the phase keeps in its swap folder (nvme) or in host memory (cpu), over
    all processes of a machine.

    16 bytes a trained parameter for the optimizer and the gradients, and 2 or 4 a parameter for
    the weights, where they are offloaded there. Parameters are counted in the headers of the base
    model's files.
    """
    sizes = read_sizes(
        base, phase.family, phase.adapter, phase.frozen_parameters, phase.trainable_parameters
    )
    optimizer = OPTIMIZER_BYTES * sizes.trained if phase.offload_optimizer == where else 0
    weights = WEIGHT_BYTES[phase.mixed_precision] * sizes.everything
    return optimizer + (weights if phase.offload_param == where else 0)


def _unowned(folder: Path, what: str) -> str:
    return f"{folder}: left alone, its {OWNER} {what}; remove it if no training uses it"


def _remove(folder: Path) -> None:
    """Remove a folder, its owner last: what a cut-short removal leaves is removed next time."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != OWNER:
                path.unlink(missing_ok=True)
        if [path.name for path in folder.iterdir()] in ([], [OWNER]):
            shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, as far as another start does not remove them meanwhile."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            total += path.lstat().st_size
    return total
