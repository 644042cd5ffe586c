"""Adapters of methods other than LoRA: as a folder of peft, or merged into the base by peft."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zerotrain.artifact import file_sha256, link_or_copy
from zerotrain.config.adapters import PEFT_TYPE, check_format_supported
from zerotrain.export.formats import Options
from zerotrain.export.formats.diffusers_folder import verify_folder, write_folder
from zerotrain.export.formats.tensors import LazyTensor, tensors_in, verify_tensors, write_tensors
from zerotrain.export.formats.weights import ExportedWeights, model_without_memory
from zerotrain.models.families.adapters import FOLDER, apply_peft, tensors_of
from zerotrain.models.families.lora import PEFT_ADAPTER, PEFT_CONFIG, PEFT_PREFIX


def find(to: str | None, weights: ExportedWeights) -> Any:
    """Return the functions that write and verify the format, as in its module; None for a LoRA.

    Raises:
        PipelineError: an adapter of the method cannot have this format, or none is named.
    """
    config = f"{FOLDER}/{PEFT_CONFIG}"
    if config not in weights.artifact.files:
        return None
    check_format_supported(to, json.loads(weights.artifact.path(config).read_text())[PEFT_TYPE])
    if to == "peft":
        return SimpleNamespace(write=_write_folder, verify=_verify_folder)
    return SimpleNamespace(write=_write_merged, verify=_verify_merged)


def _write_folder(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    link_or_copy(weights.artifact.path(f"{FOLDER}/{PEFT_CONFIG}"), out / PEFT_CONFIG)
    sha256 = write_tensors(out / PEFT_ADAPTER, _adapter(weights), options.dtype, weights.lineage())
    return {PEFT_CONFIG: file_sha256(out / PEFT_CONFIG), PEFT_ADAPTER: sha256}


def _verify_folder(weights: ExportedWeights, options: Options, out: Path) -> None:
    expected = {n.removeprefix(PEFT_PREFIX): tensor for n, tensor in _adapter(weights).items()}
    loaded = tensors_of(apply_peft(model_without_memory(weights), out))
    verify_tensors(expected, loaded, options.dtype, out)


def _write_merged(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    return write_folder(weights, _merge(weights), options, out)


def _verify_merged(weights: ExportedWeights, options: Options, out: Path) -> None:
    verify_folder(weights, _merge(weights), options, out)


def _adapter(weights: ExportedWeights) -> dict[str, LazyTensor]:
    return tensors_in([weights.artifact.path(f"{FOLDER}/{PEFT_ADAPTER}")])


@torch.no_grad()
def _merge(weights: ExportedWeights) -> dict[str, LazyTensor]:
    """Return the trained part's tensors after peft's merge; all are held in float32."""
    from peft import PeftModel

    model: Any = weights.family.load_model(weights.folder)
    model = PeftModel.from_pretrained(model, str(weights.folder / FOLDER)).merge_and_unload()
    held = model.state_dict()
    return {
        name: LazyTensor(
            held[name].dtype, stored.shape, partial(held[name].to, torch.float32, copy=True)
        )
        for name, stored in weights.trained.items()
    }
