"""Folders of torch.distributed.checkpoint, as FSDP and torchtitan write them: named, not read."""

from __future__ import annotations

from pathlib import Path

from zerotrain.errors import PipelineError

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
