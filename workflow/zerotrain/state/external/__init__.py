"""External checkpoints: read like zerotrain's, and DeepSpeed's universal checkpoint written.

Folders of torch.distributed.checkpoint, as FSDP and torchtitan write them, are named and not read.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.state.checkpoint_path import OPTIMIZERS, find_checkpoint
from zerotrain.state.external.accelerate import open_accelerate, open_weights_file
from zerotrain.state.external.checkpoint import ExternalCheckpoint
from zerotrain.state.external.consistency import STEP_FILES, reading
from zerotrain.state.external.deepspeed import open_deepspeed
from zerotrain.state.external.other_files import INFO, OF_STEP, list_files, read_file_progress
from zerotrain.state.external.ranks import find_tag_folder, is_tag_folder, is_universal
from zerotrain.state.external.universal import describe_omissions, open_universal, write_universal
from zerotrain.state.external.weight_files import SafeTensors, find_weights

DRAFT = "tmp-"
"""Begins the name of a folder that HF's Trainer has not finished."""
__all__ = ["ExternalCheckpoint", "describe_omissions", "open_external", "write_universal"]


def open_external(folder: Path, *, trust_pickle: bool = False) -> ExternalCheckpoint:
    """Open another program's checkpoint, recognised by its layout.

    It may be DeepSpeed's (a folder with `latest`, or a tag folder; ZeRO 0 to 3, and universal), or
    one of accelerate or HF's Trainer with or without DeepSpeed: a model, a denoiser as a diffusers
    folder, or an adapter.

    Args:
        folder: The checkpoint: a folder, a file in it, or a safetensors file of weights alone.
        trust_pickle: Whether pickles may name any class and run its code.

    Raises:
        PipelineError: the layout is unknown, or the checkpoint is damaged or incomplete.
    """
    with reading(folder):
        return _open(find_checkpoint(folder), trust_pickle)


def _open(folder: Path, trust_pickle: bool) -> ExternalCheckpoint:
    if folder.is_file():
        return open_weights_file(folder, trust_pickle=trust_pickle)
    if not folder.is_dir():
        raise PipelineError(f"{folder}: no such folder", hint="give the folder of the checkpoint")
    if tag := find_tag_folder(folder):
        open_tag = open_universal if is_universal(tag) else open_deepspeed
        opened = open_tag(tag, trust_pickle=trust_pickle)
        inside = [] if tag == folder else list_files(tag, ())
        tags = filter(is_tag_folder, folder.iterdir())
        return replace(opened, lost=[*opened.lost, *list_files(folder, tags), *inside])
    check_not_distributed(folder)
    (below, drafts), weights = find_checkpoints_below(folder), find_weights(folder)[0]
    if weights and (not below or weights[0].parent == folder):
        opened = open_accelerate(folder, trust_pickle=trust_pickle)
        unread = list_files(folder, [*weights, *below, *drafts])
        return replace(opened, lost=[*opened.lost, *unread])
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    hint = (
        "give a checkpoint of DeepSpeed (latest, global_step*/), a folder of accelerate's "
        "save_state or HF's Trainer (model.safetensors, optimizer.bin or optimizer.pt), or an "
        "adapter's"
    )
    below += _files_with_progress(folder)
    if below:
        hint = (
            f"a checkpoint is one level below: `zerotrain state show {below[-1]}` looks into it, "
            f"and `resume_from_checkpoint: {below[-1]}` starts from it"
        )
    unfinished = f"; unfinished: {', '.join(path.name for path in drafts)}" if drafts else ""
    raise PipelineError(
        f"{folder}: no layout that is known; it holds {', '.join(names[:12]) or 'nothing'}"
        f"{unfinished}",
        hint=hint,
    )


def find_checkpoints_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints in a folder that is not one itself, in the order of their numbers.

    Returns:
        Those that are whole; and those that HF's Trainer was writing when it was ended: as tmp-*,
        or without the optimizer or the state's file that another one has.
    """
    if _has_optimizer(folder):
        return [], []
    found = [path for path in folder.iterdir() if path.is_dir() and _is_checkpoint(path)]
    # The last state of kohya's scripts, NAME-state, has no number.
    found.sort(key=lambda path: [*map(float, re.findall(r"\d+", path.name))] or [math.inf])
    has_all = {path: _has_optimizer(path) and (path / STEP_FILES[0]).is_file() for path in found}
    drafts = [path for path in found if path.name.startswith(DRAFT)]
    if any(has_all[path] for path in found if path not in drafts):
        drafts = [path for path in found if path in drafts or not has_all[path]]
    return [path for path in found if path not in drafts], drafts


def _files_with_progress(folder: Path) -> list[Path]:
    """List ai-toolkit's files of weights in a folder, in the order of their steps."""
    steps = {}
    for path in folder.glob("*.safetensors"):
        header = SafeTensors([path]).header
        if INFO in header:
            steps[path] = read_file_progress(path, header).step or 0
    return sorted(steps, key=steps.__getitem__)


def _is_checkpoint(folder: Path) -> bool:
    if is_tag_folder(folder) or any(map(is_tag_folder, folder.iterdir())):
        return True
    named = OF_STEP.search(folder.name) is not None
    return (named or _has_optimizer(folder)) and bool(find_weights(folder)[0])


def _has_optimizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in OPTIMIZERS)


METADATA = ".metadata"
MODELS = ("pytorch_model_fsdp_0", "pytorch_model_fsdp", "model")
"""Folders of the model in one of accelerate's or HF Trainer's FSDP."""
WHOLE = "pytorch_model_fsdp.bin"
"""accelerate's file of a model that FSDP saved as a whole."""


def check_not_distributed(folder: Path) -> None:
    """Check that a folder is no checkpoint of torch.distributed.checkpoint, or of FSDP as a whole.

    Raises:
        PipelineError: it is; the hint says how its weights become readable.
    """
    if (folder / WHOLE).is_file():
        raise PipelineError(
            f"{folder}: a checkpoint of FSDP, whose weights are in {WHOLE}; it is not read",
            hint="copy that file to a folder of its own as pytorch_model.bin and name this one: "
            "it starts from the weights; the optimizer's state is left out",
        )
    model = next((name for name in MODELS if (folder / name / METADATA).is_file()), None)
    if model is None and not (folder / METADATA).is_file():
        return
    place = folder / model if model is not None else folder
    raise PipelineError(
        f"{folder}: a checkpoint of torch.distributed.checkpoint (FSDP, torchtitan), not read",
        hint=f"`accelerate merge-weights {place} OUT` writes its weights as OUT/model.safetensors, "
        "which is read; the optimizer's state is left out",
    )
