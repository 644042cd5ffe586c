"""What one process of a training takes of device and host, part by part, in bytes."""

from __future__ import annotations

from zerotrain.plan.host import load_parts, save_parts
from zerotrain.plan.inputs import FP32, ParameterSizes, PlannedLaunch
from zerotrain.plan.memory_torch import CASTS, torch_parts
from zerotrain.plan.memory_zero3 import zero3_parts
from zerotrain.plan.memory_zero12 import zero12_parts
from zerotrain.plan.parts import TRAINING, MemoryPart, Moment


def memory_parts(
    launch: PlannedLaunch,
    model: ParameterSizes,
    activations: int,
    on_host: int = 0,
    *,
    casts_traced: bool = False,
) -> list[MemoryPart]:
    """Every part of one process's memory.

    What the device's driver and libraries take for themselves (a CUDA context, cuBLAS, NCCL) is not
    among them, nor the imported modules' memory on the host: neither has a formula.

    Args:
        launch: The launch's values.
        model: The model's sizes.
        activations: The most bytes that a micro batch's forward and backward pass takes on the
            device: what is saved, what operations hold meanwhile, and one parameter's gradient;
            not the weights, nor their casts.
        on_host: Bytes of what is saved on the host instead.
        casts_traced: Whether `activations` has autocast's copies of the weights, after all.
    """
    engine = {0: torch_parts, 1: zero12_parts, 2: zero12_parts, 3: zero3_parts}[launch.stage]
    # Stage 1 reduces after the backward pass, the others as soon as a bucket is full.
    reducing = (Moment.REDUCE,) if launch.stage > 1 else ()
    passes = (Moment.FORWARD, Moment.BACKWARD, *reducing)
    parts = [
        *load_parts(launch, model),
        *engine(launch, model),
        *_average_parts(launch, model),
        MemoryPart("activations", activations, "device", passes, "a trace of the model"),
        MemoryPart("activations on the host", on_host, "host", passes, "a trace of the model"),
        *save_parts(launch, model),
    ]
    left_out = {CASTS} if casts_traced else set()
    return [part for part in parts if part.bytes and part.name not in left_out]


def _average_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """The moving average of the weights, which each process keeps of its own part."""
    if not launch.average:
        return []
    # Plain PyTorch deals whole parameters out; ZeRO cuts them.
    dealt = [sum(map(sum, (g[rank :: launch.processes] for g in model.groups)))
             for rank in range(launch.processes)]  # fmt: skip
    own = max(dealt) if launch.engine == "torch" else -(-model.trained_numel // launch.processes)
    on_host = launch.average_on_host or launch.offload_optimizer != "none"
    return [
        MemoryPart(
            "moving average", FP32 * own, "host" if on_host else "device", TRAINING,
            "4 B a parameter of its part (zerotrain/training/average.py)",
        )
    ]  # fmt: skip


def saves_nothing(launch: PlannedLaunch) -> str | None:
    """Why ZeRO saves no memory under a launch, if it does not."""
    if launch.engine == "torch" or launch.processes > 1:
        return None
    if launch.offload_optimizer != "none" or launch.offload_param != "none":
        return None
    return (
        f"one process and nothing offloaded: ZeRO-{launch.stage} has nobody to share with, and "
        "takes more than plain PyTorch for its copies and buckets"
    )
