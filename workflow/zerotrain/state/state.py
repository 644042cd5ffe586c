"""The training state that crosses phases: engine-neutral, safetensors and JSON only.

A state folder (kind "state", format 1) contains
    state.json                 a TrainerState; plus "shapes": {parameter: shape} and
                               "slots": {slot: {parameter: file}}
    <slot>-00000.safetensors   one float32 tensor per parameter name, in the parameter's shape,
                               except where optimizers.slot_shape gives another shape or none
    records/                   the log and the resources of the run so far
with the slots ``master`` (weights) and the optimizer's own (Adam: ``exp_avg``, ``exp_avg_sq``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from zerotrain import artifact
from zerotrain.artifact.documents import DocumentError, read_record
from zerotrain.artifact.tensor_file import (
    OpenTensorFile,
    TensorParts,
    open_file,
    write_tensor_file,
)
from zerotrain.config.optimizers import slot_shape
from zerotrain.state.position import HINT, MASTER, Count, TrainerState, read_position

KIND = "state"
SHARD_BYTES = 1024**3
"""Size limit of written shards with more than one tensor; reading and writing hold one tensor."""

ReadTensor = Callable[[str, str], torch.Tensor]
"""(parameter, slot) to its full float32 tensor."""

FillPart = Callable[[str, str, int, torch.Tensor], None]
"""(parameter, slot, start, into): fill a flat tensor with the slot's elements from `start`. A
process with a part of a parameter reads only that part."""


def parts_of(read: ReadTensor) -> FillPart:
    """Return a reader of parts of tensors that are in memory."""

    def fill(name: str, slot: str, start: int, into: torch.Tensor) -> None:
        into.copy_(read(name, slot).flatten()[start : start + into.numel()])

    return fill


def write_tensors(
    folder: Path, prefix: str, tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Write named tensors as shards `prefix`-00000.safetensors, ...; each at most SHARD_BYTES.

    Names and sizes need not be known beforehand: each tensor is written when the iterable yields
    it, and may be changed when the next one is requested.

    Returns:
        The file of each name.
    """
    files: dict[str, str] = {}
    shard: OpenTensorFile | None = None
    count = 0

    def close() -> None:
        if shard is not None:
            files.update(dict.fromkeys(shard.close(), f"{prefix}-{count:05d}.safetensors"))

    for name, tensor in tensors:
        full = shard is not None and shard.size and shard.size + tensor.nbytes > SHARD_BYTES
        if shard is not None and (full or not shard.takes(name, tensor)):
            close()
            shard, count = None, count + 1
        if shard is None:
            shard = OpenTensorFile(folder / f"{prefix}-{count:05d}.safetensors")
        shard.write(name, tensor)
    close()
    return files


class Shards:
    """Safetensors files, each mapped once: headers are parsed once, pages loaded on access."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def file(self, path: Path) -> Any:
        """Return the open file; it stays open as long as this object lives."""
        if path not in self._open:
            self._open[path] = open_file(path)
        return self._open[path]

    def tensor(self, path: Path, name: str) -> torch.Tensor:
        """Return a tensor of a file.

        Raises:
            DocumentError: it has none of this name.
        """
        try:
            tensor: torch.Tensor = self.file(path).get_tensor(name)
        except SafetensorError as error:
            raise DocumentError(path, f"has no tensor {name}", hint=HINT) from error
        return tensor


def write_state(
    folder: Path,
    position: TrainerState,
    shapes: Mapping[str, list[int]],
    slots: list[str],
    read: ReadTensor,
) -> dict[str, str]:
    """Fill a draft folder with a training state; `read` returns each tensor when it is written.

    Returns:
        The sha256 of the tensor files by name, for `draft.known`.
    """
    files: dict[str, dict[str, str]] = {slot: {} for slot in slots}
    known: dict[str, str] = {}
    for slot in slots:
        every = {n: slot_shape(position.optimizer, slot, shape) for n, shape in shapes.items()}
        own = {name: shape for name, shape in every.items() if shape is not None}
        for number, names in enumerate(group_into_shards(own)):
            file = f"{slot}-{number:05d}.safetensors"
            layout = {name: (torch.float32, own[name]) for name in names}
            known[file] = write_tensor_file(folder / file, layout, partial(_of_slot, read, slot))
            files[slot].update(dict.fromkeys(names, file))
    artifact.write_json(
        folder / "state.json", {**asdict(position), "shapes": dict(shapes), "slots": files}
    )
    return known


def _of_slot(read: ReadTensor, slot: str, name: str) -> torch.Tensor:
    return read(name, slot)


def group_into_shards(shapes: Mapping[str, list[int]]) -> Iterator[list[str]]:
    """Yield the names in order, in groups whose float32 tensors fit SHARD_BYTES."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = torch.Size(shape).numel() * torch.float32.itemsize
        if names and size + nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names


@dataclass(frozen=True)
class _Tensors:
    """The part of state.json that is about tensors."""

    shapes: dict[str, list[Count]]
    slots: dict[str, dict[str, str]]
    """The file of each parameter, by slot."""


class State:
    """A published training state, read tensor by tensor."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.artifact = artifact.read(folder, KIND, verify=verify)
        self.position = read_position(self.artifact, "state.json")
        path = self.artifact.path("state.json")
        tensors = read_record(path, _Tensors, hint=HINT)
        optimizer = self.position.optimizer
        for slot, files in {MASTER: {}, **tensors.slots}.items():
            shapes = tensors.shapes.items()
            own = {n for n, shape in shapes if slot_shape(optimizer, slot, shape) is not None}
            if files.keys() != own:
                why = f"slots.{slot} and shapes have different parameters"
                raise DocumentError(path, why, hint=HINT)
        self.shapes, self._files = tensors.shapes, tensors.slots
        self._shards = Shards()
        self._parts = TensorParts()

    @property
    def names(self) -> list[str]:
        """List the trained parameters, in the order of the model."""
        return list(self.shapes)

    @property
    def slots(self) -> list[str]:
        """List master and the optimizer's slots."""
        return list(self._files)

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """Return the full float32 tensor of one parameter in one slot."""
        path = self.artifact.path(self._files[slot][name])
        return self._shards.tensor(path, name)

    def fill(self, name: str, slot: str, start: int, into: torch.Tensor) -> None:
        """Fill a flat tensor with a parameter's slot from element `start`; read nothing else."""
        path = self.artifact.path(self._files[slot][name])
        self._parts.fill(path, name, start, into)
