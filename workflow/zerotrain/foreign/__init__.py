"""Checkpoints of other programs: read as zerotrain's own, and DeepSpeed's universal one written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.foreign.accelerate import find_weights, open_accelerate, open_weights_file
from zerotrain.foreign.checkpoint import ForeignCheckpoint
from zerotrain.foreign.deepspeed import open_deepspeed
from zerotrain.foreign.ranks import find_tag_folder, is_universal
from zerotrain.foreign.universal import left_out_of_universal, write_universal
from zerotrain.foreign.universal_source import open_universal

__all__ = ["ForeignCheckpoint", "left_out_of_universal", "open_foreign", "write_universal"]


def open_foreign(
    folder: Path, *, trust_pickle: bool = False, parameter_names: Sequence[str] | None = None
) -> ForeignCheckpoint:
    """Open another program's checkpoint, known by its layout.

    Known are DeepSpeed's (a folder with `latest`, or a tag folder; ZeRO 0 to 3, and universal), and
    accelerate's save_state with and without DeepSpeed, with the denoiser as a diffusers folder or
    not.

    Args:
        folder: The checkpoint: a folder, or a safetensors file of weights alone.
        trust_pickle: Let pickles name any class, and run its code.
        parameter_names: The trained parameters in the optimizer's order; only torch's numbered
            optimizers need them.

    Raises:
        PipelineError: the folder is of no known layout, damaged, or half-written.
    """
    if folder.is_file() and folder.suffix == ".safetensors":
        return open_weights_file(folder, parameter_names=parameter_names)
    if not folder.is_dir():
        raise PipelineError(f"{folder}: no such folder", hint="give the folder of the checkpoint")
    if tag := find_tag_folder(folder):
        if is_universal(tag):
            return open_universal(tag, trust_pickle=trust_pickle)
        return open_deepspeed(tag, trust_pickle=trust_pickle, parameter_names=parameter_names)
    if find_weights(folder)[0]:
        return open_accelerate(folder, trust_pickle=trust_pickle, parameter_names=parameter_names)
    found = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    raise PipelineError(
        f"{folder}: no layout that is known; it holds {', '.join(found[:12]) or 'nothing'}",
        hint="give a DeepSpeed checkpoint (latest, global_step*/) or a folder of accelerate's "
        "save_state (model.safetensors, optimizer.bin)",
    )
