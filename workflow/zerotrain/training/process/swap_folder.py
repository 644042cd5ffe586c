"""Swap folders on a fast disk: each training has its own, and removes those of dead ones.

<offload_path>/zerotrain-<run>-<phase>-<token>/
    owner.json   the process that is responsible for the training, a ProcessRecord
    ...          what DeepSpeed swaps out

DeepSpeed uses the same file names in every training and removes no file: two trainings of one path
would read each other's weights, and a killed one leaves hundreds of gigabytes behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import read_record
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import disk
from zerotrain.machine.file_lock import hold, is_held
from zerotrain.machine.processes import ProcessRecord, this_process
from zerotrain.machine.regular_file import write_text
from zerotrain.models.sizes import read_sizes

PREFIX = "zerotrain-"
OWNER = "owner.json"
OPTIMIZER_BYTES = 16
"""Bytes per trained parameter: float32 master weight, Adam's two moments and the gradient."""
WEIGHT_BYTES = {"no": 4, "bf16": 2, "fp16": 2}
"""Bytes per parameter, by precision."""


@contextlib.contextmanager
def swap_folder(phase: ResolvedPhase, needed_bytes: int) -> Iterator[tuple[Path, list[str]]]:
    """Make a folder for one training's swapped tensors, which is removed at the end.

    Args:
        phase: The phase; its offload_path names the disk.
        needed_bytes: Bytes that the training will write there.

    Yields:
        The folder, and messages for the user about the folders that were removed or left alone.

    Raises:
        PipelineError: offload_path is not a folder, is not writable, is in memory, or has too
            little space.
    """
    path = disk.on_this_machine(phase.launch.offload_path or "")
    disk.check_folder(path, phase.phase)
    messages = clear_dead(path)
    check_disk(phase, needed_bytes)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{phase.run}-{phase.phase}-", dir=path))
    try:
        draft = folder / f".{OWNER}.new"
        write_text(draft, json.dumps(asdict(this_process())) + "\n")
        with hold(draft):
            draft.replace(folder / OWNER)
            yield folder, messages
    finally:
        _remove(folder)


def check_disk(phase: ResolvedPhase, needed_bytes: int) -> None:
    """Refuse an offload_path that cannot hold the phase's swapped tensors.

    Raises:
        PipelineError: it is not a folder, is not writable, is in memory, or has too little space.
    """
    path = Path(os.path.expandvars(phase.launch.offload_path or ""))
    disk.check_folder(path, phase.phase)
    weight = WEIGHT_BYTES[phase.launch.mixed_precision]
    free = shutil.disk_usage(path).free
    if free < needed_bytes:
        raise PipelineError(
            f"phase {phase.phase}: launch.offload_path {path} has {disk.size(free)} free, the "
            f"phase swaps {disk.size(needed_bytes)} ({OPTIMIZER_BYTES} bytes a trained parameter, "
            f"{weight} a parameter)",
            hint="free some, name a folder on a larger disk, or use zero3_offload, which keeps it "
            "in memory",
        )


def clear_dead(path: Path) -> list[str]:
    """Remove the swap folders with dead owners, of any phase.

    The folder of a live owner stays, and so does one of another host, if the owner's state is
    unknown.

    Returns:
        A message for each folder that was removed, or that has no owner and was left alone.
    """
    messages: list[str] = []
    for folder in sorted(path.glob(f"{PREFIX}*")):
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            owner = read_record(folder / OWNER, ProcessRecord)
            dead = not _is_alive(owner, folder / OWNER)
        except FileNotFoundError:
            if not folder.exists():  # its own training, or another start, has just removed it
                continue
            messages.append(_describe_unowned(folder, "is missing"))
            continue
        except (OSError, ValueError):
            messages.append(_describe_unowned(folder, "cannot be read"))
            continue
        if dead:
            size = _size(folder)
            _remove(folder)
            messages.append(
                f"{folder}: swap files of a training that has died (pid {owner.pid}) removed, "
                f"{disk.size(size)}"
            )
    return messages


def _is_alive(owner: ProcessRecord, file: Path) -> bool:
    """Return whether an owner is alive; one in another container of this machine locks its file."""
    running = owner.is_running()
    if running is None and owner.host == socket.gethostname():
        return is_held(file) is not False
    return running is not False


def needed_bytes(phase: ResolvedPhase, base: Artifact, where: str = "nvme") -> int:
    """Return the bytes that a training keeps in its swap folder (nvme) or in host memory (cpu).

    The number covers all processes of a machine: 16 bytes per trained parameter for the optimizer
    and the gradients (12 with bf16 moments), and 2 or 4 per parameter for the weights, if they are
    offloaded there; in host memory also 2 or 4 per trained parameter for transfers to and from the
    device. Parameters are counted in the headers of the base model's files.
    """
    sizes = read_sizes(
        base, phase.family, phase.adapter, phase.frozen_parameters, phase.trainable_parameters
    )
    weight = WEIGHT_BYTES[phase.launch.mixed_precision]
    each = OPTIMIZER_BYTES - (4 if phase.launch.bf16_optimizer_states else 0)
    each += weight if where == "cpu" else 0
    optimizer = each * sizes.trained if phase.derived.offload_optimizer == where else 0
    return optimizer + (weight * sizes.everything if phase.derived.offload_param == where else 0)


def _describe_unowned(folder: Path, what: str) -> str:
    return f"{folder}: left alone, its {OWNER} {what}; remove it if no training uses it"


def _remove(folder: Path) -> None:
    """Remove a folder, its owner file last: the next start completes a partial removal."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != OWNER:
                path.unlink(missing_ok=True)
        if [path.name for path in folder.iterdir()] in ([], [OWNER]):
            shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    """Return the bytes of a folder's files, unless another start removes them at the same time."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            total += path.lstat().st_size
    return total
