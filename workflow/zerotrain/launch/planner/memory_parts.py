"""Memory of one training process on device and host, part by part, in bytes.

Parts of the model, of plain PyTorch (zerotrain.training.engines.torch_engine) and of ZeRO stages 1
and 2, as DeepSpeed 0.19.8 allocates them; those of stage 3 are in memory_zero3. A part of no bytes
is left out, so that a condition is a factor.
"""

from __future__ import annotations

from zerotrain.launch.planner.buckets import (
    flat_sizes,
    gradients_of_partition,
    largest_fill,
    round_up,
)
from zerotrain.launch.planner.inputs import (
    FP32,
    LOCKED,
    NORM,
    TRAINING,
    MemoryPart,
    Moment,
    ParameterSizes,
    Place,
    PlannedLaunch,
    since,
)
from zerotrain.launch.planner.memory_zero3 import zero3_parts
from zerotrain.launch.zero import rounding

ENGINE = "zerotrain/training/engines/torch_engine.py"
SOURCE = "deepspeed/runtime/zero/stage_1_and_2.py"
DDP = "torch/nn/parallel/distributed.py: gradient_as_bucket_view is off"
AUTOCAST = 2
CASTS = "weights cast by autocast"
"""Name of a part that traces of activations under autocast also contain."""


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
    engine = {0: _torch_parts, 1: _zero12_parts, 2: _zero12_parts, 3: zero3_parts}[launch.stage]
    # Stage 1 reduces after the backward pass, the others as soon as a bucket is full.
    reducing = (Moment.REDUCE,) if launch.stage > 1 else ()
    passes = (Moment.FORWARD, Moment.BACKWARD, *reducing)
    parts = [
        *_load_parts(launch, model),
        *engine(launch, model),
        _average_part(launch, model),
        MemoryPart(
            "quantized weights", sum(model.quantized.values()), "device", since(Moment.PLACE),
            "codes, scales and tables of each layer (zerotrain/models/quantized_linear.py)",
            state=True,
        ),
        MemoryPart("activations", activations, "device", passes, "a trace of the model"),
        MemoryPart("activations on the host", on_host, "host", passes, "a trace of the model"),
        MemoryPart(
            "tensor being written", FP32 * model.largest * (not launch.cpu), "host",
            (Moment.SAVE,),
            "4 B an element of the largest parameter (zerotrain/state/checkpoint.py: write_rank)",
        ),
    ]  # fmt: skip
    left_out = {CASTS} if casts_traced else set()
    return [part for part in parts if part.bytes and part.name not in left_out]


def _average_part(launch: PlannedLaunch, model: ParameterSizes) -> MemoryPart:
    """Return the moving average of the weights; each process keeps its own share."""
    # Plain PyTorch distributes whole parameters; ZeRO partitions them.
    dealt = [sum(map(sum, (g[rank :: launch.processes] for g in model.groups)))
             for rank in range(launch.processes)]  # fmt: skip
    own = max(dealt) if launch.engine == "torch" else -(-model.trained_numel // launch.processes)
    on_host = launch.average_on_host or launch.offload_optimizer != "none"
    return MemoryPart(
        "moving average", FP32 * own * launch.average, "host" if on_host else "device", TRAINING,
        "4 B a parameter of its part (zerotrain/training/engines/ema.py)",
    )  # fmt: skip


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


def _load_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
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
    cast = launch.engine != "torch" and launch.item < FP32
    return [
        MemoryPart(
            "model as it is loaded", FP32 * model.numel * (model.stored_bytes != FP32), "host",
            since(Moment.LOAD, Moment.PLACE), "4 B a parameter: its files are of another type",
        ),
        MemoryPart(
            "exact weights for the masters", FP32 * model.trained_numel * (cast and launch.exact),
            "host", since(Moment.PLACE, Moment.BUCKETS),
            "4 B a trained parameter: DeepSpeed would make its masters of rounded weights "
            "(zerotrain/training/engines/zero_engine.py: _copies)",
        ),
        MemoryPart(
            "model as it is cast",
            launch.item * (model.numel - model.quantized_numel) * (cast and not launch.cpu),
            "host", (Moment.PLACE,),
            "2 B a parameter: cast before it is moved (deepspeed/runtime/engine.py: "
            "_configure_distributed_model)",
        ),
    ]  # fmt: skip


def _torch_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the parts of plain PyTorch, without activations."""
    flat = FP32 * sum(round_up(sum(group), 2) for group in model.groups)
    # The peak while the groups are flattened one by one, with their gradients.
    sizes = [FP32 * sum(group) for group in model.groups]
    flattening = max(sum(sizes[n:]) + 2 * sum(sizes[: n + 1]) for n in range(len(sizes)))
    states = launch.slots * flat
    if launch.slot_bytes is not None:
        states = sum(launch.slot_bytes(numel) for group in model.groups for numel in group)
    exchanged = FP32 * model.trained_numel * (launch.processes > 1)
    return [
        MemoryPart(
            "weights", flat, "device", since(Moment.FLATTEN),
            f"4 B a trained parameter, flat ({ENGINE}: FlatGroup)", state=True,
        ),
        MemoryPart(
            "gradients", flat, "device", since(Moment.FLATTEN),
            f"4 B a trained parameter, flat and never freed ({ENGINE}: FlatGroup)", state=True,
        ),
        MemoryPart(
            "optimizer states", states, "device", TRAINING,
            f"{launch.slots} x {'1 B' if launch.slot_bytes else '4 B'} a trained parameter "
            "(torch.optim, at the first step)", state=True,
        ),
        MemoryPart(
            "weights before they are flat", flattening - 2 * flat, "device",
            since(Moment.PLACE, Moment.FLATTEN),
            f"4 B a trained parameter until its group is flat ({ENGINE}: FlatGroup)",
        ),
        MemoryPart(
            "norm of the largest gradient", NORM * model.largest, "device", (Moment.CLIP,),
            f"8 B an element of it: the norm is taken in float64 ({ENGINE}: _clip)",
        ),
        MemoryPart(
            "frozen weights", FP32 * model.frozen_numel, "device", since(Moment.PLACE),
            f"4 B a frozen parameter: they stay in float32 ({ENGINE})", state=True,
        ),
        MemoryPart(
            "buckets of DDP", exchanged, "device", since(Moment.BUFFERS),
            f"4 B a trained parameter: gradients are exchanged in copies ({DDP})",
            touched=exchanged,
        ),
        MemoryPart(
            CASTS,
            AUTOCAST * (model.numel - model.quantized_numel) * (launch.mixed_precision != "no"),
            "device", (Moment.FORWARD, Moment.BACKWARD),
            "2 B a parameter, kept for the backward pass (torch.autocast's cache)",
        ),
    ]  # fmt: skip


def _zero12_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the parts of ZeRO stages 1 and 2, without activations."""
    item, flats = launch.item, flat_sizes(model.groups, launch.processes)
    own = sum(flats) // launch.processes
    offloaded = launch.offload_optimizer != "none"
    place: Place = "host" if offloaded else "device"
    # zerotrain/training/engines/zero_corrections.py: one_copy_on_device
    flat_on_host = offloaded and launch.processes == 1 and not launch.cpu
    cloned_to_host = offloaded and not launch.cpu
    bucket = int(launch.value("reduce_bucket_size"))
    held = largest_fill(model.backward_order, bucket)
    reducing = (Moment.BACKWARD, Moment.REDUCE)
    many = 2 if launch.value("overlap_comm") else 1
    return [
        MemoryPart(
            "weights", item * sum(flats), "device", since(Moment.FLATTEN),
            f"{item} B a trained parameter, flat ({SOURCE}: __init__)", state=True,
        ),
        MemoryPart(
            "weights before they are flat", item * model.trained_numel, "device",
            since(Moment.PLACE, Moment.PLACE if flat_on_host else Moment.FLATTEN),
            f"{item} B a trained parameter ({SOURCE}: flatten_dense_tensors_aligned)",
        ),
        MemoryPart(
            "masters", FP32 * own, place, since(Moment.MASTERS),
            f"4 B a parameter of its partition ({SOURCE}: single_partition_of_fp32_groups)",
            state=True,
        ),
        MemoryPart(
            "optimizer states", launch.slots * launch.slot_item * own, place, TRAINING,
            f"{launch.slots} x {launch.slot_item} B a parameter of its partition, at the first "
            "step",
            state=True,
        ),
        MemoryPart(
            "frozen weights", item * model.frozen_numel, "device", since(Moment.PLACE),
            f"{item} B a frozen parameter: these stages cut none", state=True,
        ),
        MemoryPart(
            "weights before and after they are flat",
            item * (model.trained_numel + sum(flats)) * flat_on_host,
            "host", (Moment.FLATTEN,), f"2 x {item} B a trained parameter ({SOURCE}: cpu_data)",
        ),
        MemoryPart(
            "weights copied for the masters",
            item * max(flats) // launch.processes * (item < FP32 and not cloned_to_host),
            "device", (Moment.MASTERS,), f"a partition in 16 bits ({SOURCE}: __init__, clone)",
        ),
        MemoryPart(
            "gloo's copy of the weights",
            item * max(flats) * (launch.cpu and launch.processes > 1), "device", (Moment.GATHER,),
            "gloo, which a CPU's processes talk through, gathers into a copy "
            "(deepspeed/runtime/utils.py: all_gather_dp_groups)",
        ),
        MemoryPart(
            "reduce buckets", many * item * bucket, "device", reducing,
            f"{many} x reduce_bucket_size x {item} B ({SOURCE}: setup_buckets)",
            touched=many * item * held,
        ),
        MemoryPart(
            "copy of the bucket", item * held * (launch.processes > 1), "device", reducing,
            f"the bucket where it holds parts of several partitions ({SOURCE}: "
            "allreduce_bucket)",
        ),
        *(
            _offloaded_parts(launch, model, flats)
            if offloaded
            else _own_parts(launch, model, flats, held)
        ),
    ]  # fmt: skip


def _own_parts(
    launch: PlannedLaunch, model: ParameterSizes, flats: list[int], held: int
) -> list[MemoryPart]:
    """Return gradients and temporaries if the optimizer is on the device.

    Args:
        launch: The launch's values.
        model: The model's sizes.
        flats: Elements of each group's flat tensor.
        held: Most elements that the bucket holds.
    """
    item, largest = launch.item, max(flats) // launch.processes
    kept = gradients_of_partition(model.groups, launch.processes)
    kept_why = f"{item} B a parameter of its partition ({SOURCE}: copy_grads_in_partition)"
    last = (Moment.CLIP, Moment.STEP)
    parts = [
        MemoryPart(
            "zeros for the states", FP32 * largest, "device", (Moment.BUFFERS,),
            f"4 B a parameter of its partition ({SOURCE}: initialize_optimizer_states)",
        ),
        MemoryPart(
            "norm of the largest gradient", NORM * model.largest, "device", (Moment.CLIP,),
            f"8 B an element of it ({SOURCE}: get_grad_norm_direct)",
        ),
        MemoryPart(
            "gradients made flat", item * largest, "device", (Moment.STEP,),
            f"{item} B a parameter of its partition, next to the gradients ({SOURCE}: step)",
        ),
        MemoryPart(
            "gradients in float32", FP32 * largest * (item < FP32), "device", (Moment.STEP,),
            f"4 B a parameter of its partition ({SOURCE}: step)",
        ),
    ]  # fmt: skip
    if launch.stage == 2:
        when = (Moment.BACKWARD, Moment.REDUCE, *last)
        return [*parts, MemoryPart("gradients", item * kept, "device", when, kept_why, state=True)]
    return [
        *parts,
        MemoryPart(
            "gradients", item * model.trained_numel, "device", (Moment.BACKWARD,),
            f"{item} B a trained parameter: stage 1 cuts none until the last micro batch",
            state=True,
        ),
        MemoryPart(
            "gradients not yet reduced", item * (model.trained_numel - held), "device",
            (Moment.REDUCE,), f"all but those of the first bucket ({SOURCE}: reduce_gradients)",
        ),
        MemoryPart(
            "gradients of its partition", item * kept, "device", (Moment.REDUCE,), kept_why,
            touched=item * min(kept, held),
        ),
        MemoryPart("gradients of its partition", item * kept, "device", last, kept_why),
    ]  # fmt: skip


def _offloaded_parts(
    launch: PlannedLaunch, model: ParameterSizes, flats: list[int]
) -> list[MemoryPart]:
    """Return gradients and buffers if the optimizer is on the host."""
    item, owns = launch.item, [flat // launch.processes for flat in flats]
    own, largest = sum(owns), model.largest
    kept = gradients_of_partition(model.groups, launch.processes) * (launch.accumulation > 1)
    locked = launch.is_pinned("offload_optimizer")
    copied = [FP32 * n for n in owns] * 2 + [item * n for n in owns] + [item * largest, item * kept]
    return [
        MemoryPart(
            "gradients", FP32 * own, "host", since(Moment.BUFFERS),
            f"4 B a parameter of its partition, never freed ({SOURCE}: "
            "initialize_optimizer_states)", state=True,
        ),
        MemoryPart(
            "weights on their way to the device", item * own, "host", since(Moment.MASTERS),
            f"{item} B a parameter of its partition ({SOURCE}: "
            "param_buffer_of_bit16_for_cpu_offload_groups)", state=True,
        ),
        MemoryPart(
            "gradient on its way", item * largest, "host", since(Moment.BUFFERS),
            f"{item} B an element of the largest parameter ({SOURCE}: "
            "temp_grad_buffer_for_cpu_offload)",
        ),
        MemoryPart(
            "gradient on its way", item * largest, "device", since(Moment.BUFFERS),
            f"{item} B an element of the largest parameter ({SOURCE}: "
            "temp_grad_buffer_for_gpu_offload)",
        ),
        MemoryPart(
            "norm of the largest gradient", NORM * largest, "device",
            (Moment.BACKWARD, Moment.REDUCE),
            f"8 B an element of it ({SOURCE}: set_norm_for_param_grad_in_gpu)",
        ),
        MemoryPart(
            "gradients accumulated", item * kept, "host", TRAINING,
            f"{item} B a parameter of its partition where micro batches are accumulated "
            f"({SOURCE}: accumulated_grads_in_cpu)",
        ),
        MemoryPart(
            "weights converted for the masters",
            item * max(owns) * (item < FP32 and not launch.cpu), "host", (Moment.MASTERS,),
            "a copy in 16 bits before it is converted (Tensor.to)",
        ),
        MemoryPart(
            "copy for locking pages", FP32 * max(owns) * locked, "host",
            (Moment.MASTERS, Moment.BUFFERS), "what is locked is copied (Tensor.pin_memory)",
        ),
        MemoryPart(
            "locked pages beyond the tensors", rounding(copied) * locked, "host",
            since(Moment.BUFFERS), LOCKED,
        ),
    ]  # fmt: skip
