"""Checkpoints: what an engine's processes hold, as flat fragments of named float32 tensors.

One format for every engine, so that reading one never needs the engine. A checkpoint folder (kind
"checkpoint", format 1) holds
    checkpoint.json               a TrainingPosition; plus "parameters": {name: shape},
                                  "slots": [...] and "fragments": {rank: {name: [start, numel]}}
    rank-00000-00000.safetensors  tensors "<parameter>|<slot>": the part [start, start + numel) of
                                  the flattened parameter that the rank holds
    records/                      the log and the resources of the run so far
A switch never reads it: export_weights makes a state of it first. A resume of the same phase does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.in_use import hold
from zerotrain.errors import PipelineError
from zerotrain.optimizers import slot_shape
from zerotrain.position import MASTER, TrainingPosition, read_document, read_position
from zerotrain.state import Shards, sharded, write_tensors
from zerotrain.tensor_file import write_tensor_file

KIND = "checkpoint"


@dataclass(frozen=True)
class Fragment:
    """A contiguous part of one parameter's flattened slots, as one rank holds it."""

    name: str
    start: int
    slots: dict[str, torch.Tensor]
    """Float32 tensors by slot, ``master`` among them; flat and of equal length, but for slots of
    a shape of their own (zerotrain.optimizers.slot_shape), which are whole."""


def tensor_name(name: str, slot: str) -> str:
    """What a slot of a parameter is called in a rank's files."""
    return f"{name}|{slot}"


def span(fragment: Fragment) -> list[int]:
    """Start and length of a fragment in its flattened parameter."""
    return [fragment.start, fragment.slots[MASTER].numel()]


def write_rank(folder: Path, rank: int, fragments: Iterable[Fragment]) -> dict[str, list[int]]:
    """Write one rank's fragments into a draft folder, each when the iterable gives it.

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
    """Write one rank's tensors, whose sizes are known, into a draft folder.

    Args:
        folder: The draft.
        rank: The rank.
        sizes: Elements of each tensor, by its tensor_name.
        read: Gives each one, flat, when its turn comes; float32 is written.

    Returns:
        The sha256 of each file, by name: what `draft.known` takes.
    """
    known: dict[str, str] = {}
    for number, names in enumerate(sharded({name: [size] for name, size in sizes.items()})):
        file = f"{_prefix(rank)}-{number:05d}.safetensors"
        layout = {name: (torch.float32, [sizes[name]]) for name in names}
        known[file] = write_tensor_file(folder / file, layout, read)
    return known


def write_position(
    folder: Path,
    position: TrainingPosition,
    shapes: dict[str, list[int]],
    slots: list[str],
    spans: list[dict[str, list[int]]],
) -> None:
    """Write checkpoint.json; `spans` are each fragment's start and length, rank by rank."""
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


class Checkpoint:
    """A complete checkpoint, read tensor by tensor, whatever engine wrote it."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self._held = hold(folder)  # a training that goes on must not remove it meanwhile
        self.artifact: Artifact = artifact.read(folder, KIND, verify=verify)
        self.position = read_position(self.artifact, "checkpoint.json")
        parts = {"parameters": dict, "slots": list, "fragments": dict}
        document = read_document(self.artifact, "checkpoint.json", parts)
        self.shapes: dict[str, list[int]] = document["parameters"]
        self.slots: list[str] = document["slots"]
        self._spans: dict[str, dict[str, list[int]]] = document["fragments"]
        self._shards = Shards()
        self._files: dict[str, dict[str, Path]] = {}
        for rank in self._spans:
            self._files[rank] = {}
            for file in sorted(self.artifact.files):
                if file.startswith(f"{rank}-"):
                    path = self.artifact.path(file)
                    self._files[rank].update(dict.fromkeys(self._shards.open(path).keys(), path))

    @property
    def names(self) -> list[str]:
        """The trained parameters, in the order of the model."""
        return list(self.shapes)

    def holds(self, name: str, slot: str) -> bool:
        """Whether a parameter has a slot: Muon and Adafactor keep some of some alone."""
        return any(f"{name}|{slot}" in files for files in self._files.values())

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """The full float32 tensor of one parameter in one slot, put together from its fragments.

        Raises:
            PipelineError: a part of it lies in no rank's file.
        """
        shape = torch.Size(self.shapes[name])
        covered, key = 0, tensor_name(name, slot)
        held = [r for r, spans in self._spans.items() if name in spans and key in self._files[r]]
        if len(held) == 1 and self._spans[held[0]][name] == [0, shape.numel()]:
            only: torch.Tensor = self._shards.open(self._files[held[0]][key]).get_tensor(key)
            own = slot_shape(self.position.optimizer, slot, self.shapes[name])
            return only.reshape(own or shape)
        whole = torch.empty(shape.numel())
        for rank in sorted(held, key=lambda rank: self._spans[rank][name]):
            start, length = self._spans[rank][name]
            if start != covered:
                break  # a gap, or a part that two ranks hold
            shard = self._shards.open(self._files[rank][key])
            whole[start : start + length] = shard.get_tensor(key)
            covered += length
        if covered != shape.numel():
            raise PipelineError(
                f"{self.artifact.folder}: {name} ({slot}) has {covered} of {shape.numel()} "
                "elements",
                hint="a rank's file is missing; use an older checkpoint of the phase's progress",
            )
        return whole.reshape(shape)
