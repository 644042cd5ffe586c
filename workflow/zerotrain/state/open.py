"""Sources that a training can continue from, opened with one interface; and exported weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from zerotrain import artifact
from zerotrain.artifact.documents import DocumentError, read_json
from zerotrain.artifact.tensor_file import open_tensors
from zerotrain.config.adapters import stack_of
from zerotrain.config.optimizers import slot_shape
from zerotrain.errors import PipelineError
from zerotrain.models.adapter_config import PEFT_PREFIX
from zerotrain.models.base import KIND as BASE
from zerotrain.models.base import MODEL_INDEX, in_part
from zerotrain.state.checkpoint import KIND as CHECKPOINT
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.checkpoint_path import OPTIMIZERS
from zerotrain.state.position import EMA_SLOT, MASTER, Source
from zerotrain.state.state import KIND as STATE
from zerotrain.state.state import State

WEIGHTS, EXPORTED = "weights", "exported"
IN_FORMATS_OF_OTHERS = (EXPORTED, "universal")
"""Kinds of folders that are read like other programs', once they are verified as complete."""


class Weights:
    """The trained part of a weights folder: names, shapes and one slot, but no position."""

    position = None

    def __init__(self, folder: Path) -> None:
        from zerotrain.models.families import load_family
        from zerotrain.models.families.adapters import FOLDER
        from zerotrain.models.families.lora import PEFT_ADAPTER, adapter_file

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
        self.slots = [EMA_SLOT if self.artifact.content.get("ema") else MASTER]

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """Return the tensor of a name, in the dtype of the export; there is only one slot."""
        stored = self._stored[name]
        tensor: torch.Tensor = self._files[stored].get_tensor(stored)
        return tensor


class AveragedWeights:
    """A training's EMA weights in place of its weights."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.position, self.shapes, self.names = source.position, source.shapes, source.names
        self.slots = [MASTER]

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """Return the full float32 average of one parameter; the only slot is the master."""
        return self._source.tensor(name, EMA_SLOT)


class PerLayerView:
    """A view of a LoRA whose fused layers share lora_A, with a lora_A for each layer."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.position, self.slots = source.position, source.slots
        shared = {stack_of(_layer(n)): n for n in source.names if ".lora_A." in n}
        self._stored = {name: name for name in source.names}
        for name in source.names:
            stack = stack_of(_layer(name))
            if ".lora_B." in name and stack in shared:
                self._stored.setdefault(name.replace(".lora_B.", ".lora_A."), shared[stack])
        self.shapes = {name: source.shapes[stored] for name, stored in self._stored.items()}
        self.names = list(self.shapes)

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """Return a tensor of the training; a layer's lora_A is its stack's."""
        return self._source.tensor(self._stored[name], slot)


def _layer(name: str) -> str:
    return name.partition(".lora_")[0]


def has_slot(source: Source | Weights, name: str, slot: str) -> bool:
    """Return whether a parameter has a slot: in Muon and Adafactor it depends on the shape."""
    optimizer = source.position.optimizer if source.position else ""
    return slot_shape(optimizer, slot, source.shapes[name]) is not None


def _trained_name(stored: str, prefix: str) -> str:
    """Rename an adapter's `unet.a.lora_A.weight` to `a.lora_A.default.weight`, as in training."""
    return re.sub(r"(\.lora_\w+)\.", r"\1.default.", stored.removeprefix(prefix))


def open_checkpoint(folder: Path, *, trust_pickle: bool = False) -> Source:
    """Open a source that a training can continue from: a checkpoint, a state, or an external one.

    Args:
        folder: A published or rolling checkpoint, a state, or a checkpoint of DeepSpeed or
            accelerate.
        trust_pickle: Whether another program's pickles may name any class and run its code.

    Raises:
        PipelineError: the folder is of another kind, damaged, or incomplete.
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
    from zerotrain.state.external import open_external

    # Parts of weights and tags of universal checkpoints have no manifests.
    artifact.read_around(folder, (WEIGHTS, BASE, *IN_FORMATS_OF_OTHERS))
    _check_not_model(folder)
    return open_external(
        _only_file(folder) if kind == EXPORTED else folder, trust_pickle=trust_pickle
    )


def open_view(folder: Path, *, trust_pickle: bool = False) -> Source | Weights:
    """Open any source of open_checkpoint, or the trained part of a weights folder."""
    if artifact.kind_of(folder) == WEIGHTS:
        return Weights(folder)
    return open_checkpoint(folder, trust_pickle=trust_pickle)


def check_made_here(folder: Path) -> None:
    """Check that a folder written by this program has its manifest; external folders need none.

    Raises:
        PipelineError: the manifest is missing.
    """
    ours = any(_is_position(folder / f"{kind}.json") for kind in (CHECKPOINT, STATE))
    artifact.check_published(folder, ours=ours)


def _is_position(path: Path) -> bool:
    """Return whether a file is from our checkpoint or state, or truncated so that it may be."""
    if not path.is_file():
        return False
    try:
        document = read_json(path, follow_links=True)
    except DocumentError:
        return True
    return isinstance(document, dict) and {"run", "phase", "optimizer_step"} <= document.keys()


def _check_not_model(folder: Path) -> None:
    """Refuse a complete model without checkpoints: its trained part is unknown."""
    from zerotrain.state.external import find_checkpoints_below

    if not (folder / MODEL_INDEX).is_file() or any((folder / n).is_file() for n in OPTIMIZERS):
        return
    if not any(find_checkpoints_below(folder)):
        raise PipelineError(
            f"{folder}: has {MODEL_INDEX}, so it is a whole model, not a checkpoint",
            hint="set `base` to it; or, for its weights alone, name the folder in it that was "
            "trained, such as unet or transformer",
        )


def _only_file(folder: Path) -> Path:
    """Return the file of an exported folder with one file, such as kohya's; else the folder."""
    from zerotrain.state.external.weight_files import find_weights

    files = [] if find_weights(folder)[0] else sorted(folder.glob("*.safetensors"))
    return files[0] if len(files) == 1 else folder
