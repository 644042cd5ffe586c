"""Memory of plain PyTorch: zerotrain.training.engines.torch_engine, part by part."""

from __future__ import annotations

from zerotrain.launch.planner.buckets import round_up
from zerotrain.launch.planner.inputs import FP32, ParameterSizes, PlannedLaunch
from zerotrain.launch.planner.parts import TRAINING, MemoryPart, Moment, since

ENGINE = "zerotrain/training/engines/torch_engine.py"
NORM = 8
"""Bytes per gradient element while its norm is computed, in float64."""
AUTOCAST = 2
CASTS = "weights cast by autocast"
"""Name of a part that traces of activations under autocast also contain."""
DDP = "torch/nn/parallel/distributed.py: gradient_as_bucket_view is off"


def torch_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the parts of one process, without activations."""
    flat = FP32 * sum(round_up(sum(group), 2) for group in model.groups)
    parts = [
        MemoryPart(
            "weights", flat, "device", since(Moment.FLATTEN),
            f"4 B a trained parameter, flat ({ENGINE}: FlatGroup)", state=True,
        ),
        MemoryPart(
            "gradients", flat, "device", since(Moment.FLATTEN),
            f"4 B a trained parameter, flat and never freed ({ENGINE}: FlatGroup)", state=True,
        ),
        MemoryPart(
            "optimizer states", _states(launch, model, flat), "device", TRAINING,
            f"{launch.slots} x {'1 B' if launch.slot_bytes else '4 B'} a trained parameter "
            "(torch.optim, at the first step)", state=True,
        ),
        MemoryPart(
            "weights before they are flat", _flattening(model) - 2 * flat, "device",
            since(Moment.PLACE, Moment.FLATTEN),
            f"4 B a trained parameter until its group is flat ({ENGINE}: FlatGroup)",
        ),
        MemoryPart(
            "norm of the largest gradient", NORM * model.largest, "device", (Moment.CLIP,),
            f"8 B an element of it: the norm is taken in float64 ({ENGINE}: _clip)",
        ),
    ]  # fmt: skip
    if model.frozen:
        parts.append(
            MemoryPart(
                "frozen weights", FP32 * model.frozen_numel, "device", since(Moment.PLACE),
                f"4 B a frozen parameter: they stay in float32 ({ENGINE})", state=True,
            )
        )  # fmt: skip
    if launch.processes > 1:
        parts.append(
            MemoryPart(
                "buckets of DDP", FP32 * model.trained_numel, "device", since(Moment.BUFFERS),
                f"4 B a trained parameter: gradients are exchanged in copies ({DDP})",
                touched=FP32 * model.trained_numel,
            )
        )  # fmt: skip
    if launch.mixed_precision != "no":
        parts.append(
            MemoryPart(
                CASTS, AUTOCAST * (model.numel - model.quantized_numel), "device",
                (Moment.FORWARD, Moment.BACKWARD),
                "2 B a parameter, kept for the backward pass (torch.autocast's cache)",
            )
        )  # fmt: skip
    return parts


def _states(launch: PlannedLaunch, model: ParameterSizes, flat: int) -> int:
    if launch.slot_bytes is None:
        return launch.slots * flat
    return sum(launch.slot_bytes(numel) for group in model.groups for numel in group)


def _flattening(model: ParameterSizes) -> int:
    """Return the peak bytes while the groups are flattened one by one, with their gradients."""
    sizes = [FP32 * sum(group) for group in model.groups]
    return max(sum(sizes[n:]) + 2 * sum(sizes[: n + 1]) for n in range(len(sizes)))
