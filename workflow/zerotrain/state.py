"""The training state: engine-neutral, safetensors and JSON only. It is what crosses a phase.

A state folder (kind "state", format 1) holds
    state.json                 see TrainingPosition; plus "slots": {slot: {parameter: file}}
    <slot>-00000.safetensors   one tensor per parameter name, float32, the parameter's own shape
    records/                   the log and the resources of the run so far
with the slots ``master`` (weights) and the optimizer's own (Adam: ``exp_avg``, ``exp_avg_sq``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from zerotrain import artifact
from zerotrain.artifact import Artifact

KIND = "state"
MASTER = "master"
ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
SHARD_BYTES = 1024**3
"""Written shards hold at most this, so that no writer holds more than one beside the engine."""

ReadTensor = Callable[[str, str], torch.Tensor]
"""(parameter, slot) to its full float32 tensor."""


@dataclass(frozen=True, kw_only=True)
class TrainingPosition:
    """Where a training stands, apart from its tensors. The JSON of a checkpoint and of a state."""

    run: str
    phase: str
    step: int
    """Global optimizer steps done."""
    samples: int
    """Samples drawn since the start of the run: the position of the sampler."""
    optimizer: str
    optimizer_step: int
    """The optimizer's own count, from which Adam's bias correction follows."""
    param_groups: list[dict[str, Any]]
    """Learning rate, betas, eps, weight_decay and the parameter names of each group."""
    lr_scheduler: str
    lr_scheduler_steps: int
    rng: dict[str, Any]
    """Every draw is a function of (seed, epoch, sample) or (seed, step, rank): the seed is all."""
    engine: dict[str, Any]
    """What made it: preset, engine, zero_stage, offload_optimizer, world_size, mixed_precision."""


def read_position(found: Artifact, name: str) -> TrainingPosition:
    """Read the position from a checkpoint's or a state's JSON file."""
    document = json.loads(found.path(name).read_text())
    return TrainingPosition(**{f.name: document[f.name] for f in fields(TrainingPosition)})


def write_tensors(
    folder: Path, prefix: str, tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Write named tensors as shards `prefix`-00000.safetensors, ...; each at most SHARD_BYTES.

    Tensors are taken one by one from the iterable, so only a shard of them lives at a time.

    Returns:
        The file of each name.
    """
    files: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = count = 0

    def flush() -> None:
        nonlocal shard, size, count
        if shard:
            name = f"{prefix}-{count:05d}.safetensors"
            save_file(shard, folder / name)
            files.update(dict.fromkeys(shard, name))
            shard, size, count = {}, 0, count + 1

    for name, tensor in tensors:
        tensor = tensor.detach().contiguous()
        if size and size + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
    flush()
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
    folder: Path, position: TrainingPosition, names: list[str], slots: list[str], read: ReadTensor
) -> None:
    """Fill a draft folder with a training state; `read` gives each tensor when its turn comes."""
    files = {
        slot: write_tensors(folder, slot, ((name, read(name, slot)) for name in names))
        for slot in slots
    }
    artifact.write_json(folder / "state.json", {**asdict(position), "slots": files})


class State:
    """A published training state, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self.artifact = artifact.read(folder, KIND)
        self.position = read_position(self.artifact, "state.json")
        self._files: dict[str, dict[str, str]] = json.loads(
            self.artifact.path("state.json").read_text()
        )["slots"]
        self._shards = Shards()

    @property
    def names(self) -> list[str]:
        """The trained parameters, sorted."""
        return list(self._files[MASTER])

    @property
    def slots(self) -> list[str]:
        """master and the optimizer's slots."""
        return list(self._files)

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """The full float32 tensor of one parameter in one slot."""
        path = self.artifact.path(self._files[slot][name])
        found: torch.Tensor = self._shards.open(path).get_tensor(name)
        return found
