"""The training state: engine-neutral, safetensors and JSON only. It is what crosses a phase.

A state folder (kind "state", format 1) holds
    state.json                 a TrainingPosition; plus "shapes": {parameter: shape} and
                               "slots": {slot: {parameter: file}}
    <slot>-00000.safetensors   one tensor per parameter name, float32, the parameter's own shape
                               but for optimizers.slot_shape, by which a parameter may lack a slot
    records/                   the log and the resources of the run so far
with the slots ``master`` (weights) and the optimizer's own (Adam: ``exp_avg``, ``exp_avg_sq``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.optimizers import slot_shape
from zerotrain.position import TrainingPosition, read_document, read_position
from zerotrain.tensor_file import OpenTensorFile, write_tensor_file

KIND = "state"
SHARD_BYTES = 1024**3
"""Written shards hold at most this, or one tensor; writing and reading hold one tensor."""

ReadTensor = Callable[[str, str], torch.Tensor]
"""(parameter, slot) to its full float32 tensor."""


def write_tensors(
    folder: Path, prefix: str, tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Write named tensors as shards `prefix`-00000.safetensors, ...; each at most SHARD_BYTES.

    Nothing need be known of them beforehand: each is written when the iterable gives it, and may be
    changed when the next one is asked for.

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
    """Safetensors files, each mapped once: its header is parsed once, its pages come when read."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def open(self, path: Path) -> Any:
        """The open file; it stays open as long as this object lives."""
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


def write_state(
    folder: Path,
    position: TrainingPosition,
    shapes: Mapping[str, list[int]],
    slots: list[str],
    read: ReadTensor,
) -> dict[str, str]:
    """Fill a draft folder with a training state; `read` gives each tensor when its turn comes.

    Returns:
        The sha256 of the files with tensors, by name: what `draft.known` takes.
    """
    files: dict[str, dict[str, str]] = {slot: {} for slot in slots}
    known: dict[str, str] = {}
    for slot in slots:
        every = {n: slot_shape(position.optimizer, slot, shape) for n, shape in shapes.items()}
        own = {name: shape for name, shape in every.items() if shape is not None}
        for number, names in enumerate(sharded(own)):
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


def sharded(shapes: Mapping[str, list[int]]) -> Iterator[list[str]]:
    """The names in their order, cut so that each part's float32 tensors fit into SHARD_BYTES."""
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


class State:
    """A published training state, read tensor by tensor."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.artifact = artifact.read(folder, KIND, verify=verify)
        self.position = read_position(self.artifact, "state.json")
        document = read_document(self.artifact, "state.json", {"slots": dict})
        if "shapes" not in document:
            raise PipelineError(
                f"{folder}: its state.json has no shapes; an unreleased version wrote it",
                hint="export the phase again",
            )
        self.shapes: dict[str, list[int]] = document["shapes"]
        self._files: dict[str, dict[str, str]] = document["slots"]
        self._shards = Shards()

    @property
    def names(self) -> list[str]:
        """The trained parameters, in the order of the model."""
        return list(self.shapes)

    @property
    def slots(self) -> list[str]:
        """master and the optimizer's slots."""
        return list(self._files)

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """The full float32 tensor of one parameter in one slot."""
        path = self.artifact.path(self._files[slot][name])
        found: torch.Tensor = self._shards.open(path).get_tensor(name)
        return found
