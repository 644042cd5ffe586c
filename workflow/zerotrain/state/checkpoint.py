"""Checkpoints: the tensors of an engine's processes, as flat fragments of named float32 tensors.

All engines use one format, so reading a checkpoint never needs the engine. A checkpoint folder
(kind "checkpoint", format 1) contains
    checkpoint.json               a TrainerState; plus "parameters": {name: shape},
                                  "slots": [...] and "fragments": {rank: {name: [start, numel]}}
    rank-00000-00000.safetensors  tensors "<parameter>|<slot>": the part [start, start + numel) of
                                  the flattened parameter that the rank holds
    records/                      the log and the resources of the run so far
A switch does not read checkpoints: export_weights converts them to states first. A resume of the
same phase reads them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.documents import read_record
from zerotrain.artifact.leftovers import hold
from zerotrain.artifact.tensor_file import TensorParts, write_tensor_file
from zerotrain.config.optimizers import slot_shape
from zerotrain.errors import PipelineError
from zerotrain.state.position import (
    HINT,
    MASTER,
    Count,
    TrainerState,
    read_position,
)
from zerotrain.state.state import Shards, group_into_shards, write_tensors

KIND = "checkpoint"


@dataclass(frozen=True)
class Fragment:
    """A contiguous part of one parameter's flattened slots, as held by one rank."""

    name: str
    start: int
    slots: dict[str, torch.Tensor]
    """Float32 tensors by slot, including ``master``; flat and of equal length, except for slots
    with their own shape (zerotrain.config.optimizers.slot_shape), which are complete."""


def tensor_name(name: str, slot: str) -> str:
    """Return the tensor name of a parameter's slot in a rank's files."""
    return f"{name}|{slot}"


def rank_files(folder: Path, rank: int) -> list[Path]:
    """Return the files of one rank in a checkpoint's folder."""
    return sorted(folder.glob(f"{_prefix(rank)}-*.safetensors"))


def span(fragment: Fragment) -> list[int]:
    """Return the start and length of a fragment in its flattened parameter."""
    return [fragment.start, fragment.slots[MASTER].numel()]


def write_rank(folder: Path, rank: int, fragments: Iterable[Fragment]) -> dict[str, list[int]]:
    """Write one rank's fragments into a draft folder as the iterable yields them.

    Returns:
        Start and length of each parameter's fragment.
    """
    spans: dict[str, list[int]] = {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for fragment in fragments:
            spans[fragment.name] = span(fragment)
            for slot, tensor in fragment.slots.items():
                flat = tensor.detach().to("cpu", torch.float32).flatten()
                yield tensor_name(fragment.name, slot), flat

    write_tensors(folder, _prefix(rank), tensors())
    return spans


def write_rank_files(
    folder: Path, rank: int, sizes: Mapping[str, int], read: Callable[[str], torch.Tensor]
) -> dict[str, str]:
    """Write one rank's tensors, with known sizes, into a draft folder.

    Args:
        folder: The draft.
        rank: The rank.
        sizes: Number of elements of each tensor, by its tensor_name.
        read: Returns a tensor by name, flat; called when it is written, as float32.

    Returns:
        The sha256 of each file by name, for `draft.known`.
    """
    known: dict[str, str] = {}
    for number, names in enumerate(
        group_into_shards({name: [size] for name, size in sizes.items()})
    ):
        file = f"{_prefix(rank)}-{number:05d}.safetensors"
        layout = {name: (torch.float32, [sizes[name]]) for name in names}
        known[file] = write_tensor_file(folder / file, layout, read)
    return known


def write_position(
    folder: Path,
    position: TrainerState,
    shapes: dict[str, list[int]],
    slots: list[str],
    spans: list[dict[str, list[int]]],
) -> None:
    """Write checkpoint.json; `spans` are the start and length of each fragment, by rank."""
    artifact.write_json(
        folder / "checkpoint.json",
        {
            **asdict(position),
            "parameters": shapes,
            "slots": slots,
            "fragments": {_prefix(rank): own for rank, own in enumerate(spans)},
        },
    )


def _prefix(rank: int) -> str:
    return f"rank-{rank:05d}"


@dataclass(frozen=True)
class _Tensors:
    """The part of checkpoint.json that is about tensors."""

    parameters: dict[str, list[Count]]
    """Their shapes."""
    slots: list[str]
    fragments: dict[str, dict[str, tuple[Count, Count]]]
    """Start and length of each fragment, by rank."""


class Checkpoint:
    """A complete checkpoint, read tensor by tensor, whatever engine wrote it."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self._held = hold(folder)  # keeps a running training from removing it
        self.artifact: Artifact = artifact.read(folder, KIND, verify=verify)
        self.position = read_position(self.artifact, "checkpoint.json")
        tensors = read_record(self.artifact.path("checkpoint.json"), _Tensors, hint=HINT)
        self.shapes, self.slots = tensors.parameters, tensors.slots
        self._spans = tensors.fragments
        self._shards, self._parts = Shards(), TensorParts()
        self._files: dict[str, dict[str, Path]] = {}
        for rank in self._spans:
            self._files[rank] = {}
            for file in sorted(self.artifact.files):
                if file.startswith(f"{rank}-"):
                    path = self.artifact.path(file)
                    self._files[rank].update(dict.fromkeys(self._parts.names(path), path))

    @property
    def names(self) -> list[str]:
        """List the trained parameters, in the order of the model."""
        return list(self.shapes)

    def has_slot(self, name: str, slot: str) -> bool:
        """Return whether a parameter has a slot: in Muon and Adafactor not all have."""
        return any(f"{name}|{slot}" in files for files in self._files.values())

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """Assemble the full float32 tensor of one parameter in one slot from its fragments.

        Raises:
            PipelineError: a part of it is in no rank's file.
        """
        shape = torch.Size(self.shapes[name])
        key, pieces = tensor_name(name, slot), self._pieces(name, slot)
        if len(pieces) == 1:
            only = self._shards.tensor(pieces[0][2], key)
            own = slot_shape(self.position.optimizer, slot, self.shapes[name])
            return only.reshape(own or shape)
        whole = torch.empty(shape.numel())
        for start, length, path in pieces:
            whole[start : start + length] = self._shards.tensor(path, key)
        return whole.reshape(shape)

    def fill(self, name: str, slot: str, start: int, into: torch.Tensor) -> None:
        """Fill a flat tensor with a parameter's slot from element `start`; read no other elements.

        A slot with its own shape is one piece.

        Raises:
            PipelineError: a part of the slot is in no rank's file, or its file ends early.
        """
        key, pieces = tensor_name(name, slot), self._pieces(name, slot)
        if len(pieces) == 1:
            self._parts.fill(pieces[0][2], key, start, into)
            return
        end = start + into.numel()
        for first, length, path in pieces:
            low, high = max(start, first), min(end, first + length)
            if low < high:
                self._parts.fill(path, key, low - first, into[low - start : high - start])

    def _pieces(self, name: str, slot: str) -> list[tuple[int, int, Path]]:
        """Return start, length and file of a slot's parts, without gaps or overlaps."""
        key, size = tensor_name(name, slot), torch.Size(self.shapes[name]).numel()
        pieces: list[tuple[int, int, Path]] = []
        covered = 0
        held = [r for r, spans in self._spans.items() if name in spans and key in self._files[r]]
        for rank in sorted(held, key=lambda rank: self._spans[rank][name]):
            start, length = self._spans[rank][name]
            if start != covered:
                break
            pieces.append((start, length, self._files[rank][key]))
            covered += length
        if covered != size:
            raise PipelineError(
                f"{self.artifact.folder}: {name} ({slot}) has {covered} of {size} elements",
                hint="a rank's file is missing; use an older checkpoint of the phase's progress",
            )
        return pieces
