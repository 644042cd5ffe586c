"""Host memory in addition to that of the engines: load, exact copy, save."""

from __future__ import annotations

from zerotrain.launch.planner.inputs import FP32, ParameterSizes, PlannedLaunch
from zerotrain.launch.planner.parts import MemoryPart, Moment, since


def load_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the parts of loading the model until it is on the device in its type.

    safetensors maps float32 files: those pages belong to the page cache, and the system reclaims
    them if necessary. Files of another type are converted (zerotrain/models/families).
    """
    if launch.init:
        most = max(model.parameters.values())
        return [
            MemoryPart(
                "parameter as it is read", launch.item * most, "host", (Moment.PLACE,),
                f"{launch.item} B an element of the largest (zerotrain/training/"
                "partitioned_model.py)",
            )
        ]  # fmt: skip
    mapped = model.stored_bytes == FP32
    parts = [
        MemoryPart(
            "model as it is loaded", 0 if mapped else FP32 * model.numel, "host",
            since(Moment.LOAD, Moment.PLACE),
            "mapped from files of float32, which takes no memory of its own"
            if mapped else "4 B a parameter: its files are of another type",
        )
    ]  # fmt: skip
    if launch.engine == "torch" or launch.item == FP32:
        return parts
    if launch.exact:
        parts.append(
            MemoryPart(
                "exact weights for the masters", FP32 * model.trained_numel, "host",
                since(Moment.PLACE, Moment.BUCKETS),
                "4 B a trained parameter: DeepSpeed would make its masters of rounded weights "
                "(zerotrain/training/engines/zero_engine.py: _copies)",
            )
        )  # fmt: skip
    if not launch.cpu:
        parts.append(
            MemoryPart(
                "model as it is cast", launch.item * (model.numel - model.quantized_numel), "host",
                (Moment.PLACE,),
                "2 B a parameter: cast before it is moved (deepspeed/runtime/engine.py: "
                "_configure_distributed_model)",
            )
        )  # fmt: skip
    return parts


def save_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the parts of writing a checkpoint: one tensor, copied from the device."""
    if launch.cpu:
        return []
    return [
        MemoryPart(
            "tensor being written", FP32 * model.largest, "host", (Moment.SAVE,),
            "4 B an element of the largest parameter (zerotrain/state/checkpoint.py: write_rank)",
        )
    ]  # fmt: skip
