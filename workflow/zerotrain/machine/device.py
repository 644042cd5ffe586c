"""The device that this process computes on, as reported by torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_type() -> str:
    """Return torch's name of the device: cuda (also with ROCm), npu, mps or cpu."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found and found.type in ("cuda", "npu", "mps") else "cpu"


def process_device() -> torch.device:
    """Return the device of this process by its LOCAL_RANK."""
    import torch

    kind = device_type()
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def peak_device_bytes() -> int:
    """Return the peak memory that this process has reserved on its device; 0 on a CPU or MPS."""
    import torch

    kind = device_type()
    if kind not in ("cuda", "npu"):
        return 0
    return int(torch.get_device_module(kind).max_memory_reserved())


def device_bytes(device: str) -> int | None:
    """Return the memory of this process's device; None for devices with host memory."""
    import torch

    if device not in ("cuda", "npu"):
        return None
    return int(torch.get_device_module(device).mem_get_info()[1])


def free_device_bytes(device: str) -> int | None:
    """Return the bytes that this process can still allocate; None for devices with host memory."""
    import gc

    import torch

    if device not in ("cuda", "npu"):
        return None
    gc.collect()
    module = torch.get_device_module(device)
    module.empty_cache()
    return int(module.mem_get_info()[0])
