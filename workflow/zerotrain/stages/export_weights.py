"""export_weights: the one door between phases and out of the pipeline.

From a phase's checkpoint, whatever engine wrote it: weights in the family's own format, and the
engine-neutral state that the next phase starts from. Needs no GPU and no engine.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.checkpoint import Checkpoint
from zerotrain.config import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.families import Family, load_family
from zerotrain.state import KIND as STATE
from zerotrain.state import MASTER, write_state

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_weights(
    config: RunConfig, checkpoint: Path, base: Path, weights: Path, state: Path
) -> None:
    """Publish a phase's weights and state, after checking them.

    Args:
        config: The run's configuration (family and export).
        checkpoint: Folder of the phase's checkpoint.
        base: Folder of the base model, whose other parts complete the weights.
        weights: Folder to publish the weights at: a pipeline that diffusers loads.
        state: Folder to publish the training state at.

    Raises:
        PipelineError: a parameter is missing, empty, of another shape or not finite; the message
            names it, and nothing is published.
    """
    family = load_family(config.family)
    found = Checkpoint(checkpoint)
    model = artifact.read(base, "base")
    dtype = DTYPES[config.export.dtype]
    parents = {"checkpoint": found.artifact, "base": model}
    made_by = {"engine": found.position.engine, "dtype": config.export.dtype}
    tensors = {name: _checked(found, name, dtype) for name in found.names}
    with artifact.publish(weights, "weights", parents=parents, made_by=made_by) as draft:
        draft.known.update(_link_other_parts(model, family, draft.folder))
        family.save_denoiser(base, tensors, draft.folder)
        _check_written(family, draft.folder, tensors)
        draft.content = {
            "family": config.family,
            "step": found.position.step,
            "dtype": config.export.dtype,
        }
    with artifact.publish(state, STATE, parents=parents, made_by=made_by) as draft:
        write_state(draft.folder, found.position, found.names, found.slots, found.tensor)
        records = found.artifact.folder / artifact.RECORDS
        shutil.copytree(records, draft.folder / artifact.RECORDS)


def _checked(found: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = found.tensor(name, MASTER)
    hint = f"the checkpoint {found.artifact.folder} is damaged; train on from an older one"
    if tensor.numel() == 0:
        raise PipelineError(f"{name}: empty tensor of shape {list(tensor.shape)}", hint=hint)
    cast = tensor.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        count = int((~torch.isfinite(cast)).sum())
        if bool(torch.isfinite(tensor).all()):
            hint = "choose export.dtype fp32 or bf16: the weights exceed the range of fp16"
        raise PipelineError(f"{name}: {count} values are not finite in {dtype}", hint=hint)
    return cast


def _link_other_parts(base: Artifact, family: Family, folder: Path) -> dict[str, str]:
    """Give the base's untrained parts a second name, so that the folder is a whole pipeline.

    Returns:
        Their sha256 by name.
    """
    linked: dict[str, str] = {}
    for name, entry in base.files.items():
        if name.split("/")[0] != family.denoiser_part and not name.startswith(artifact.RECORDS):
            artifact.link_or_copy(base.path(name), folder / name)
            linked[name] = entry["sha256"]
    return linked


def _check_written(family: Family, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Load what was written with the real library and compare it with what was meant."""
    loaded = family.load_denoiser(folder).state_dict()
    for name, tensor in expected.items():
        if name not in loaded or not torch.equal(loaded[name], tensor.to(loaded[name].dtype)):
            raise PipelineError(
                f"{folder}: {name} reads back otherwise than it was written",
                hint="look at the disk; nothing was published",
            )
