"""The software and the device of a computation, which can change its last bits."""

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
