"""The device that this process computes on, as reported by torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


PACKAGES = ("torch", "diffusers", "transformers", "peft", "deepspeed", "accelerate")
"""Packages whose code computes numbers in a training."""
SWITCHES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "DIFFUSERS_ATTN_BACKEND"),
    *("CUBLAS_WORKSPACE_CONFIG", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR"),
    *("NCCL_ALGO", "NCCL_PROTO"),
)
"""Environment variables that make libraries use other arithmetic."""
DRIVER = Path("/sys/module/nvidia/version")


def software(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return versions of Python and of installed packages, and the switches that are set.

    No package is imported.

    Args:
        packages: Names of distributions; those not installed are omitted.

    Returns:
        "versions.<package>" and "env.<NAME>", for example {"versions.torch": "2.13.0+cpu"}.
    """
    found = {"versions.python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[f"versions.{package}"] = version(package)
    return found | {f"env.{name}": os.environ[name] for name in SWITCHES if name in os.environ}


def device_software(device: torch.device) -> dict[str, str]:
    """Return the name of a device, its driver and the libraries that torch computes with on it.

    Returns:
        "device", and for a GPU "driver" and "versions.<library>" of cuda, hip, cudnn and nccl if
        known.
    """
    import torch

    if device.type not in ("cuda", "npu"):
        return {"device": device.type}
    found = {"device": torch.get_device_module(device.type).get_device_name(device)}
    if device.type == "npu":
        return found
    with suppress(OSError):
        found["driver"] = DRIVER.read_text(encoding="utf-8").strip()
    libraries: dict[str, Any] = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
    with suppress(RuntimeError, AttributeError):  # a build without NCCL
        found_nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        libraries["nccl"] = ".".join(map(str, found_nccl))
    return found | {f"versions.{name}": str(one) for name, one in libraries.items() if one}
