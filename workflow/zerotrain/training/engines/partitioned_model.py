"""Partitioned loading for ZeRO-3: no process ever holds more than its part and one parameter.

Without it every process loads the whole model into host memory before DeepSpeed partitions it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed import zero
from deepspeed.accelerator import get_accelerator

from zerotrain.artifact.documents import read_object
from zerotrain.artifact.tensor_file import MIXED_PRECISION, open_tensors
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.families import Family
from zerotrain.models.families.model_tensors import without_memory
from zerotrain.models.trainable import check_same_parameters, choose_trained, trained_parameters
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import MASTER
from zerotrain.state.state import FillPart, State, parts_of
from zerotrain.training.engines.zero_corrections import point_to
from zerotrain.training.engines.zero_engine import init_distributed


def load_partitioned(
    family: Family,
    base: Path,
    phase: ResolvedPhase,
    config: Path,
    source: Checkpoint | State | None,
    swap: Path | None = None,
) -> tuple[torch.nn.Module, FillPart]:
    """Build the model without weights, then read and partition one parameter after another.

    Args:
        family: The model's family.
        base: Folder of the base model.
        phase: The resolved phase; its precision is the dtype of the parts.
        config: The phase's deepspeed.json.
        source: What training continues from. The engine loads the trained weights from it, so they
            are read here only if they are swapped to a disk.
        swap: Folder for what is swapped to a disk, instead of the one that the file names.

    Returns:
        The model with partitioned parameters, and a reader of the exact values, which 16-bit parts
        have lost.

    Raises:
        PipelineError: the base lacks a tensor or a buffer, or the source is of another model.
    """
    init_distributed()
    model = family.empty_model(base)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model = choose_trained(
        without_memory(model), phase.adapter, phase.frozen_parameters, phase.seed,
        phase.trainable_parameters,
    )  # fmt: skip
    trained = {name: list(p.shape) for name, p in trained_parameters(model).items()}
    if source is not None:
        check_same_parameters(source.shapes, trained, source.artifact.folder)
    drawn = {n: p.detach().clone() for n, p in model.named_parameters() if id(p) not in names}
    keys = {name: names.get(id(p), []) for name, p in model.named_parameters()}
    folder = base / family.trained_part
    held = open_tensors(sorted(folder.glob("*.safetensors")))

    def read(name: str, slot: str = MASTER) -> torch.Tensor:
        if source is not None and name in trained:
            return source.tensor(name, slot)
        if name in drawn:
            return drawn[name]
        key = next((key for key in keys[name] if key in held), None)
        if key is None:
            raise PipelineError(
                f"{folder}: no tensor {keys[name][0]}, which the model's config.json asks for",
                hint="complete the folder, or download the model again",
            )
        tensor: torch.Tensor = held[key].get_tensor(key)
        return tensor

    settings = read_object(config)
    if swap is not None:
        point_to(settings, swap)
    # One buffer for every parameter in turn: freed tensors between parts would fragment memory.
    later = trained if source is not None and not phase.swaps else {}
    largest = max(parameter.numel() for parameter in model.parameters())
    whole = torch.empty(largest, dtype=MIXED_PRECISION[phase.launch.mixed_precision])
    first: Any = None
    for name, parameter in model.named_parameters():
        parameter.data = whole[: parameter.numel()].view(parameter.shape)
        if name not in later:
            parameter.data.copy_(read(name))
        if first is None:
            first = parameter
            one = torch.nn.Module()
            one.register_parameter("first", parameter)
            zero.Init(module=one, config_dict_or_path=settings)
        else:
            first.convert_to_zero_parameters(param_list=[parameter])
    device = get_accelerator().current_device_name()
    for name, buffer in list(model.named_buffers()):  # DeepSpeed leaves them where they are
        if name not in held and buffer.is_meta:
            raise PipelineError(
                f"phase {phase.phase}: launch.zero3_init, but {name} is computed and not in the "
                "base's files",
                hint="remove zero3_init: the model is then loaded whole and partitioned after",
            )
        owner, _, short = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = held[name].get_tensor(name) if name in held else buffer
        module.register_buffer(
            short, tensor.to(device), persistent=short not in module._non_persistent_buffers_set
        )
    return model, parts_of(read)
