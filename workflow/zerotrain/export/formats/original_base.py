"""Conversion of a base in one file of its original layout to diffusers' layout."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from zerotrain import artifact
from zerotrain.artifact.documents import Names, read_header
from zerotrain.export.formats.ldm import load_parts
from zerotrain.export.formats.opening import name_file_in_errors
from zerotrain.models.base_places import PARTS
from zerotrain.models.families import Family
from zerotrain.models.pretrained import read_config

V_PREDICTION, ZERO_SNR = "v_pred", "ztsnr"
"""Names of empty tensors that mark what a file's model predicts."""
SCHEDULE = ("denoiser.sigmas", "denoiser.log_sigmas", "alphas_cumprod", "betas")
"""Begin the names of tensors that a scheduler computes for itself."""
PREDICTS_V: dict[str, Any] = {"prediction_type": "v_prediction"}
FROM_NOISE: dict[str, Any] = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def list_unread(names: Iterable[str]) -> list[str]:
    """List the tensors of a file that belong to no part of the model."""
    unread = Names(name for name in names if not name.startswith((*PARTS, *SCHEDULE)))
    unread.use(V_PREDICTION, ZERO_SNR)
    return unread.leftovers()


def write_parts(file: Path, family: Family, target: Path) -> None:
    """Write the weights of a file's parts into a folder with their configurations.

    Values and type are the file's; files with several types are written in float32, which holds
    them all.

    Raises:
        PipelineError: the file does not fit the configurations.
    """
    names = [*read_header(file, follow_links=True).tensors]
    if left := list_unread(names):
        what = "averaged weights (EMA)" if left[0].startswith("model_ema.") else "no part of SDXL"
        print(f"base: {file}: {len(left)} tensors, such as {left[0]}, are not taken: {what}")
    with name_file_in_errors(file):
        parts = load_parts(family, file, target, _dtype(file, names))
    with tempfile.TemporaryDirectory(dir=target.parent) as drafts:
        for part in [*parts]:
            model: Any = parts.pop(part)
            # In another folder: the part's config.json may be a link to the user's file.
            model.save_pretrained(Path(drafts) / part)
            for path in sorted((Path(drafts) / part).glob("*.safetensors*")):
                shutil.move(path, target / part / path.name)
    _write_prediction(names, target / "scheduler" / "scheduler_config.json")


def _dtype(file: Path, names: Collection[str]) -> torch.dtype:
    """Return the only type of the weights in the file, or float32 if there are several."""
    known = {"F16": torch.float16, "BF16": torch.bfloat16}
    with safe_open(file, "pt") as opened:
        types = {opened.get_slice(n).get_dtype() for n in names if n.startswith(PARTS)}
    types = {name for name in types if not name.startswith(("I", "U", "BOOL"))}
    return known.get(types.pop(), torch.float32) if len(types) == 1 else torch.float32


def _write_prediction(names: Collection[str], path: Path) -> None:
    """Write the prediction type and schedule that the file marks into the noise scheduler."""
    changed = PREDICTS_V if V_PREDICTION in names else {}
    changed = changed | (FROM_NOISE if ZERO_SNR in names else {})
    config = read_config(path)
    if config | changed != config:
        path.unlink()  # it may be a link to the user's file
        artifact.write_json(path, config | changed)
