"""The device that this process computes on, asked of torch."""

from __future__ import annotations


def device_type() -> str:
    """torch's word for it: cuda (also under ROCm), npu, mps or cpu."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found and found.type in ("cuda", "npu", "mps") else "cpu"


def peak_device_bytes() -> int:
    """The most memory that this process has reserved on its device; 0 on a CPU or MPS."""
    import torch

    kind = device_type()
    if kind not in ("cuda", "npu"):
        return 0
    return int(torch.get_device_module(kind).max_memory_reserved())


def free_device_bytes(device: str) -> int | None:
    """What this process may still take of a device; None where it has no memory of its own."""
    import gc

    import torch

    if device not in ("cuda", "npu"):
        return None
    gc.collect()
    module = torch.get_device_module(device)
    module.empty_cache()
    return int(module.mem_get_info()[0])
