"""Memory of one training process on device and host, part by part, in bytes."""

from __future__ import annotations

from zerotrain.launch.planner.inputs import FP32, ParameterSizes, PlannedLaunch
from zerotrain.launch.planner.memory_torch import CASTS, torch_parts
from zerotrain.launch.planner.memory_zero3 import zero3_parts
from zerotrain.launch.planner.memory_zero12 import zero12_parts
from zerotrain.launch.planner.parts import TRAINING, MemoryPart, Moment, since


def memory_parts(
    launch: PlannedLaunch,
    model: ParameterSizes,
    activations: int,
    on_host: int = 0,
    *,
    casts_traced: bool = False,
) -> list[MemoryPart]:
    """Return every part of one process's memory.

    Not included are the memory of the device's driver and libraries (CUDA context, cuBLAS, NCCL)
    and that of imported modules on the host: neither has a formula.

    Args:
        launch: The launch's values.
        model: The model's sizes.
        activations: Peak bytes of a micro batch's forward and backward pass on the device: saved
            tensors, temporaries of operations, and one parameter's gradient; without the weights
            and their casts.
        on_host: Bytes of tensors saved on the host instead.
        casts_traced: Whether `activations` includes autocast's copies of the weights.
    """
    engine = {0: torch_parts, 1: zero12_parts, 2: zero12_parts, 3: zero3_parts}[launch.stage]
    # Stage 1 reduces after the backward pass, the others as soon as a bucket is full.
    reducing = (Moment.REDUCE,) if launch.stage > 1 else ()
    passes = (Moment.FORWARD, Moment.BACKWARD, *reducing)
    parts = [
        *load_parts(launch, model),
        *engine(launch, model),
        *_average_parts(launch, model),
        MemoryPart(
            "quantized weights",
            sum(model.quantized.values()),
            "device",
            since(Moment.PLACE),
            "codes, scales and tables of each layer (zerotrain/models/quantized_linear.py)",
            state=True,
        ),
        MemoryPart("activations", activations, "device", passes, "a trace of the model"),
        MemoryPart("activations on the host", on_host, "host", passes, "a trace of the model"),
        *save_parts(launch, model),
    ]
    left_out = {CASTS} if casts_traced else set()
    return [part for part in parts if part.bytes and part.name not in left_out]


def _average_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the moving average of the weights; each process keeps its own share."""
    if not launch.average:
        return []
    # Plain PyTorch distributes whole parameters; ZeRO partitions them.
    dealt = [sum(map(sum, (g[rank :: launch.processes] for g in model.groups)))
             for rank in range(launch.processes)]  # fmt: skip
    own = max(dealt) if launch.engine == "torch" else -(-model.trained_numel // launch.processes)
    on_host = launch.average_on_host or launch.offload_optimizer != "none"
    return [
        MemoryPart(
            "moving average", FP32 * own, "host" if on_host else "device", TRAINING,
            "4 B a parameter of its part (zerotrain/training/engines/ema.py)",
        )
    ]  # fmt: skip


def saves_nothing(launch: PlannedLaunch) -> str | None:
    """Return why ZeRO saves no memory under a launch; None if it does."""
    if launch.engine == "torch" or launch.processes > 1:
        return None
    if launch.offload_optimizer != "none" or launch.offload_param != "none":
        return None
    return (
        f"one process and nothing offloaded: ZeRO-{launch.stage} has no process to share with, and "
        "takes more than plain PyTorch for its copies and buckets"
    )


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
