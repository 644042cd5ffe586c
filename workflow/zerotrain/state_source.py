"""What a training can go on from, opened alike whoever made it; and exported weights beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol

import torch

from zerotrain import artifact
from zerotrain.base import KIND as BASE
from zerotrain.base import MODEL_INDEX, in_part
from zerotrain.checkpoint import KIND as CHECKPOINT
from zerotrain.checkpoint import Checkpoint
from zerotrain.checkpoint_path import OPTIMIZERS
from zerotrain.errors import PipelineError
from zerotrain.optimizers import slot_shape
from zerotrain.position import EMA, MASTER, TrainingPosition
from zerotrain.state import KIND as STATE
from zerotrain.state import State
from zerotrain.tensor_file import open_tensors

WEIGHTS, EXPORTED = "weights", "exported"
IN_FORMATS_OF_OTHERS = (EXPORTED, "universal")
"""Kinds of folders that are read as those of other programs, once they are found whole."""


class Source(Protocol):
    """What a State, a Checkpoint and a foreign checkpoint have in common."""

    @property
    def position(self) -> TrainingPosition: ...
    @property
    def shapes(self) -> dict[str, list[int]]: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def slots(self) -> list[str]: ...
    def tensor(self, name: str, slot: str) -> torch.Tensor: ...


class Weights:
    """The trained part of a weights folder: names, shapes and one slot, but no position."""

    position = None

    def __init__(self, folder: Path) -> None:
        from zerotrain.families import load_family
        from zerotrain.families.adapters import FOLDER
        from zerotrain.families.lora import PEFT_ADAPTER, PEFT_PREFIX, adapter_file

        self.artifact = artifact.read(folder, WEIGHTS)
        part = load_family(self.artifact.content["family"]).trained_part
        adapter, prefix = adapter_file(part)
        files = [adapter]
        method = f"{FOLDER}/{PEFT_ADAPTER}"
        if method in self.artifact.files:  # its names are those of peft's file
            files, prefix = [method], PEFT_PREFIX
        elif adapter not in self.artifact.files:
            files = [name for name in self.artifact.files if in_part(name, part)]
        self._files = open_tensors(
            self.artifact.path(file) for file in files if file.endswith(".safetensors")
        )
        self._stored = {_trained_name(name, prefix): name for name in self._files}
        self.shapes: dict[str, list[int]] = {
            name: list(self._files[stored].get_slice(stored).get_shape())
            for name, stored in self._stored.items()
        }
        self.names = list(self.shapes)
        self.slots = [EMA if self.artifact.content.get("ema") else MASTER]

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """The tensor of a name, in the type it was exported in; there is one slot."""
        stored = self._stored[name]
        found: torch.Tensor = self._files[stored].get_tensor(stored)
        return found


class AveragedWeights:
    """A training's averaged weights (EMA) in the place of its weights."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.position, self.shapes, self.names = source.position, source.shapes, source.names
        self.slots = [MASTER]

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """The full float32 average of one parameter; there is one slot, the master."""
        return self._source.tensor(name, EMA)


def has_slot(source: Source | Weights, name: str, slot: str) -> bool:
    """Whether a parameter has one of the source's slots: Muon and Adafactor look at its shape."""
    optimizer = source.position.optimizer if source.position else ""
    return slot_shape(optimizer, slot, source.shapes[name]) is not None


def _trained_name(stored: str, prefix: str) -> str:
    """An adapter's `unet.a.lora_A.weight` to `a.lora_A.default.weight`, as in its training."""
    return re.sub(r"(\.lora_\w+)\.", r"\1.default.", stored.removeprefix(prefix))


def open_source(folder: Path, *, trust_pickle: bool = False) -> Source:
    """Open whatever a training can go on from: a checkpoint, a state, or another program's.

    Args:
        folder: A published or rolling checkpoint, a state, or a checkpoint of DeepSpeed or
            accelerate.
        trust_pickle: Let another program's pickles name any class, and run its code.

    Raises:
        PipelineError: the folder is none of these, damaged, or half-written.
    """
    check_made_here(folder)
    kind = artifact.kind_of(folder)
    if kind == CHECKPOINT:
        return Checkpoint(folder)
    if kind == STATE:
        return State(folder)
    if kind not in (None, *IN_FORMATS_OF_OTHERS):
        hint = "name a phase's checkpoint/, state/ or progress/step-*, or a folder of DeepSpeed or "
        hint += "accelerate"
        if kind == WEIGHTS:
            hint += "; or, for its weights alone, the folder or file in it that was trained"
        raise PipelineError(f"{folder}: holds {kind}, not a checkpoint or a state", hint=hint)
    from zerotrain.foreign import open_foreign

    # Parts of weights and tags of universal checkpoints have no manifests of their own.
    artifact.read_around(folder, (WEIGHTS, BASE, *IN_FORMATS_OF_OTHERS))
    _refuse_model(folder)
    return open_foreign(
        _only_file(folder) if kind == EXPORTED else folder, trust_pickle=trust_pickle
    )


def open_view(folder: Path, *, trust_pickle: bool = False) -> Source | Weights:
    """Open what open_source opens, or the trained part of a weights folder."""
    if artifact.kind_of(folder) == WEIGHTS:
        return Weights(folder)
    return open_source(folder, trust_pickle=trust_pickle)


def check_made_here(folder: Path) -> None:
    """Check that a folder which this program wrote has its manifest; another program's needs none.

    Raises:
        PipelineError: the manifest is missing.
    """
    ours = any(_is_position(folder / f"{kind}.json") for kind in (CHECKPOINT, STATE))
    artifact.check_published(folder, ours=ours)


def _is_position(path: Path) -> bool:
    """Whether a file is of a checkpoint or a state of this program, or cut off so that none can
    tell."""
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return True
    return isinstance(found, dict) and {"run", "phase", "optimizer_step"} <= found.keys()


def _refuse_model(folder: Path) -> None:
    """Refuse a whole model without checkpoints: none can tell which part of it was trained."""
    from zerotrain.foreign import find_checkpoints_below

    if not (folder / MODEL_INDEX).is_file() or any((folder / n).is_file() for n in OPTIMIZERS):
        return
    if not find_checkpoints_below(folder):
        raise PipelineError(
            f"{folder}: has {MODEL_INDEX}, so it is a whole model, not a checkpoint",
            hint="set `base` to it; or, for its weights alone, name the folder in it that was "
            "trained, such as unet or transformer",
        )


def _only_file(folder: Path) -> Path:
    """The file of an exported folder whose layout is its file's alone, as of kohya's; else the
    folder."""
    from zerotrain.foreign.weight_files import find_weights

    files = [] if find_weights(folder)[0] else sorted(folder.glob("*.safetensors"))
    return files[0] if len(files) == 1 else folder
