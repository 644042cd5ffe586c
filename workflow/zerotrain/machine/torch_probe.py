"""What torch and DeepSpeed find here, as one JSON line: python -m zerotrain.machine.torch_probe.

It is a separate process, because torch holds GPU memory once it has queried the GPU, and because a
broken installation may end the process that imports it.
"""

from __future__ import annotations

import json
from typing import Any


def main() -> None:
    """Print {"error", "accelerator", "devices", "threads", "deepspeed"}."""
    try:
        found = {"error": "", **_torch()}
    except Exception as error:  # any error of a broken installation is the answer
        found = {"error": _sentence(error)}
    else:
        found["deepspeed"] = _deepspeed()
    print(json.dumps(found), flush=True)


def _torch() -> dict[str, Any]:
    import torch

    from zerotrain.machine.device import device_type

    kind = device_type()
    devices: list[dict[str, Any]] = []
    if kind in ("cuda", "npu"):
        module = torch.get_device_module(kind)
        for number in range(module.device_count()):
            free, total = module.mem_get_info(number)
            devices.append(
                {
                    "name": module.get_device_name(number),
                    "total": total,
                    "free": free,
                    "capability": None
                    if kind == "npu" or torch.version.hip
                    else torch.cuda.get_device_capability(number),
                }
            )
    elif kind == "mps":
        devices = [{"name": "MPS", "total": None, "free": None, "capability": None}]
    accelerator = "rocm" if kind == "cuda" and torch.version.hip else kind
    return {"accelerator": accelerator, "devices": devices, "threads": torch.get_num_threads()}


def _deepspeed() -> str:
    """Return why DeepSpeed cannot be imported; empty if it can."""
    try:
        import deepspeed  # noqa: F401
    except Exception as error:
        return _sentence(error)
    return ""


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


if __name__ == "__main__":
    main()
