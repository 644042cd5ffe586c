"""Device placement of inference-only models: the whole model, or as much of it as fits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
from diffusers.hooks import apply_group_offloading

from zerotrain.machine.device import free_device_bytes
from zerotrain.machine.host import gib

WORKING = 4 * 2**30
"""Bytes that are kept free for activations: SDXL's autoencoder needs most, at 1024 px in
float32."""


class Placement(StrEnum):
    """The parts that are on the device at a time."""

    WHOLE = "all of it"
    PARTS = "the part at work"
    LAYERS = "the layer at work"


def sampling_dtype(device: str) -> torch.dtype:
    """Return the type of models on a device for sampling and measuring images."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def choose_placement(sizes: Sequence[int], free: int | None) -> Placement:
    """Choose the fastest placement that fits.

    Args:
        sizes: Bytes of each part.
        free: Bytes of the device that may be used; None if it has no separate memory.
    """
    if free is None or sum(sizes) + WORKING <= free:
        return Placement.WHOLE
    return Placement.PARTS if max(sizes) + WORKING <= free else Placement.LAYERS


def place_pipeline(pipeline: Any, device: str) -> Any:
    """Place a pipeline of diffusers on the device: all of it, or a part or a layer at a time."""
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    free = free_device_bytes(device)
    if free is not None:
        # Images are decoded one at a time, so that WORKING suffices for any number of them.
        pipeline.vae.enable_slicing()
    match _chosen(type(pipeline).__name__, [_size(part) for part in parts], free):
        case Placement.WHOLE:
            pipeline.to(device)
        case Placement.PARTS:
            pipeline.enable_model_cpu_offload(device=device)
        case Placement.LAYERS:
            pipeline.enable_group_offload(**_by_layer(device))
    return pipeline


def place_model(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """Place a single model on the device: all of it, or a layer at a time."""
    placement = _chosen(type(model).__name__, [_size(model)], free_device_bytes(device))
    if placement is Placement.WHOLE:
        return model.to(device)
    apply_group_offloading(model, **_by_layer(device))
    return model


def _by_layer(device: str) -> dict[str, Any]:
    """Return diffusers' arguments; on CUDA the next layer is copied while one computes."""
    return {
        "onload_device": torch.device(device),
        "offload_type": "leaf_level",
        "use_stream": device == "cuda",
        "low_cpu_mem_usage": True,  # else all of it would be copied to pinned memory
    }


def _chosen(name: str, sizes: Sequence[int], free: int | None) -> Placement:
    found = choose_placement(sizes, free)
    if found is not Placement.WHOLE:
        print(
            f"{name}: {gib(sum(sizes))} of weights, and {gib(free or 0)} of the device are free: "
            f"{found} is there at a time, the rest waits in the host's memory",
            file=sys.stderr,
        )
    return found


def _size(model: torch.nn.Module) -> int:
    held = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
