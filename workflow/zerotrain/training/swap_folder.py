"""Swap folders on a fast disk: each training has its own, and clears those of dead ones.

<offload_path>/zerotrain-<run>-<phase>-<token>/
    owner.json   the process that answers for the training (zerotrain.training.lock.Holder)
    ...          what DeepSpeed swaps out

DeepSpeed names its files alike in every training and removes none: two trainings of one path would
read each other's weights, and a killed one leaves hundreds of gigabytes behind.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.model_sizes import read_sizes
from zerotrain.training.lock import Holder, this_process

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
        PipelineError: offload_path is no folder, cannot be written, or has too little space.
    """
    disk = Path(phase.offload_path or "")
    _check_folder(disk, phase)
    said = clear_dead(disk)
    _check_space(disk, phase, needed_bytes)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{phase.run}-{phase.phase}-", dir=disk))
    try:
        draft = folder / f".{OWNER}.new"
        draft.write_text(json.dumps(asdict(this_process())) + "\n")
        draft.replace(folder / OWNER)
        yield folder, said
    finally:
        _remove(folder)


def clear_dead(disk: Path) -> list[str]:
    """Remove the swap folders whose owner is dead, whichever phase they served.

    A living owner's folder stays, and so does one of another host, of which nothing is known here.

    Returns:
        A sentence for each folder that was removed, or that names no owner and was left alone.
    """
    said: list[str] = []
    for folder in sorted(disk.glob(f"{PREFIX}*")):
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
                f"{_gb(size)}"
            )
    return said


def needed_bytes(phase: ResolvedPhase, base: Artifact) -> int:
    """What a training of the phase writes to its swap folder, over all processes of a machine.

    16 bytes a trained parameter for the optimizer and the gradients, and 2 or 4 a parameter for
    the weights, where they are swapped. Parameters are counted in the headers of the base model's
    files.
    """
    sizes = read_sizes(base, phase.lora, phase.frozen_parameters)
    optimizer = OPTIMIZER_BYTES * sizes.trained if phase.offload_optimizer == "nvme" else 0
    weights = WEIGHT_BYTES[phase.mixed_precision] * sizes.everything
    return optimizer + (weights if phase.offload_param == "nvme" else 0)


def _check_folder(disk: Path, phase: ResolvedPhase) -> None:
    where = f"phase {phase.phase}: launch.offload_path {disk}"
    if not disk.is_dir():
        raise PipelineError(
            f"{where} is {'a file' if disk.exists() else 'no folder'} on this machine",
            hint="name a folder on a local NVMe disk, or make it: "
            f"`mkdir -p {disk}` (it is not made for you: a disk that is not mounted would go "
            "unnoticed)",
        )
    try:
        with tempfile.TemporaryFile(dir=disk):
            pass
    except OSError as error:
        raise PipelineError(
            f"{where} cannot be written: {error.strerror}",
            hint="give this user the right to write there, or name another folder",
        ) from error


def _check_space(disk: Path, phase: ResolvedPhase, needed: int) -> None:
    free = shutil.disk_usage(disk).free
    if free < needed:
        raise PipelineError(
            f"phase {phase.phase}: launch.offload_path {disk} has {_gb(free)} free, the phase "
            f"swaps {_gb(needed)} ({OPTIMIZER_BYTES} bytes a trained parameter, "
            f"{WEIGHT_BYTES[phase.mixed_precision]} a parameter)",
            hint="free some, name a folder on a larger disk, or use zero3_offload, which keeps it "
            "in memory",
        )


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


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
