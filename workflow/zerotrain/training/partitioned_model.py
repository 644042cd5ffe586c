"""ZeRO 3 from the first byte on: no process ever holds more than its part and one parameter.

Without it every process loads the whole model into host memory before DeepSpeed cuts it up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed import zero
from deepspeed.accelerator import get_accelerator

from zerotrain.checkpoint import Checkpoint
from zerotrain.errors import PipelineError
from zerotrain.families import Family
from zerotrain.families.model_tensors import without_memory
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.position import MASTER
from zerotrain.state import ReadTensor, State
from zerotrain.tensor_file import open_tensors
from zerotrain.trained import choose_trained, refuse_other_parameters, trained_parameters
from zerotrain.training.zero_engine import init_distributed
from zerotrain.training.zero_swap import point_to

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_partitioned(
    family: Family,
    base: Path,
    phase: ResolvedPhase,
    config: Path,
    source: Checkpoint | State | None,
    swap: Path | None = None,
) -> tuple[torch.nn.Module, ReadTensor]:
    """Build the model without weights, then read and partition one parameter after another.

    Args:
        family: The model's family.
        base: Folder of the base model.
        phase: The resolved phase; its precision is the type of the parts.
        config: The phase's deepspeed.json.
        source: What training goes on from; the rest comes from the base.
        swap: Folder for what is swapped to a disk, instead of the one that the file names.

    Returns:
        The model with partitioned parameters, and what reads their exact values: parts of 16 bits
        have lost them.

    Raises:
        PipelineError: the base lacks a tensor, or the source is of another model.
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
        refuse_other_parameters(source.shapes, trained, source.artifact.folder)
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
        found: torch.Tensor = held[key].get_tensor(key)
        return found

    settings = json.loads(config.read_text())
    if swap is not None:
        point_to(settings, swap)
    # One place for every parameter in turn: freed tensors between parts would leave holes.
    largest = max(parameter.numel() for parameter in model.parameters())
    whole = torch.empty(largest, dtype=DTYPES[phase.mixed_precision])
    first: Any = None
    for name, parameter in model.named_parameters():
        parameter.data = whole[: parameter.numel()].view(parameter.shape).copy_(read(name))
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
        found = held[name].get_tensor(name) if name in held else buffer
        module.register_buffer(
            short, found.to(device), persistent=short not in module._non_persistent_buffers_set
        )
    return model, read
