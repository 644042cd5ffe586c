"""Memory of ZeRO stages 1 and 2, as DeepSpeed 0.19.8 allocates it, part by part."""

from __future__ import annotations

from zerotrain.launch.pinned_memory import LIMIT_MIB, rounding
from zerotrain.launch.planner.buckets import flat_sizes, gradients_of_partition, largest_fill
from zerotrain.launch.planner.inputs import FP32, ParameterSizes, PlannedLaunch
from zerotrain.launch.planner.memory_torch import NORM
from zerotrain.launch.planner.parts import TRAINING, MemoryPart, Moment, Place, since

SOURCE = "deepspeed/runtime/zero/stage_1_and_2.py"


def zero12_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the parts of one process, without activations."""
    item, flats = launch.item, flat_sizes(model.groups, launch.processes)
    own = sum(flats) // launch.processes
    offloaded = launch.offload_optimizer != "none"
    place: Place = "host" if offloaded else "device"
    # zerotrain/training/engines/zero_corrections.py: one_copy_on_device
    flat_on_host = offloaded and launch.processes == 1 and not launch.cpu
    cloned_to_host = offloaded and not launch.cpu
    parts = [
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
    ]  # fmt: skip
    if model.frozen:
        parts.append(
            MemoryPart(
                "frozen weights", item * model.frozen_numel, "device", since(Moment.PLACE),
                f"{item} B a frozen parameter: these stages cut none", state=True,
            )
        )  # fmt: skip
    if flat_on_host:
        parts.append(
            MemoryPart(
                "weights before and after they are flat", item * (model.trained_numel + sum(flats)),
                "host", (Moment.FLATTEN,), f"2 x {item} B a trained parameter ({SOURCE}: cpu_data)",
            )
        )  # fmt: skip
    if item < FP32 and not cloned_to_host:
        parts.append(
            MemoryPart(
                "weights copied for the masters", item * max(flats) // launch.processes, "device",
                (Moment.MASTERS,), f"a partition in 16 bits ({SOURCE}: __init__, clone)",
            )
        )  # fmt: skip
    if launch.cpu and launch.processes > 1:
        parts.append(
            MemoryPart(
                "gloo's copy of the weights", item * max(flats), "device", (Moment.GATHER,),
                "gloo, which a CPU's processes talk through, gathers into a copy "
                "(deepspeed/runtime/utils.py: all_gather_dp_groups)",
            )
        )  # fmt: skip
    parts += _bucket_parts(launch, model)
    parts += _offloaded_parts(launch, model, flats) if offloaded else _own_parts(launch, model)
    return parts


def _bucket_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    bucket = int(launch.value("reduce_bucket_size"))
    held = largest_fill(model.backward_order, bucket)
    when = (Moment.BACKWARD, Moment.REDUCE)
    many = 2 if launch.value("overlap_comm") else 1
    parts = [
        MemoryPart(
            "reduce buckets", many * launch.item * bucket, "device", when,
            f"{many} x reduce_bucket_size x {launch.item} B ({SOURCE}: setup_buckets)",
            touched=min(many, 2) * launch.item * held,
        )
    ]  # fmt: skip
    if launch.processes > 1:
        parts.append(
            MemoryPart(
                "copy of the bucket", launch.item * held, "device", when,
                f"the bucket where it holds parts of several partitions ({SOURCE}: "
                "allreduce_bucket)",
            )
        )  # fmt: skip
    return parts


def _own_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return gradients and temporaries if the optimizer is on the device."""
    item, flats = launch.item, flat_sizes(model.groups, launch.processes)
    largest = max(flats) // launch.processes
    held = largest_fill(model.backward_order, int(launch.value("reduce_bucket_size")))
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
    ]  # fmt: skip
    if item < FP32:
        parts.append(
            MemoryPart(
                "gradients in float32", FP32 * largest, "device", (Moment.STEP,),
                f"4 B a parameter of its partition ({SOURCE}: step)",
            )
        )  # fmt: skip
    if launch.stage == 2:
        return [
            *parts,
            MemoryPart(
                "gradients", item * kept, "device", (Moment.BACKWARD, Moment.REDUCE, *last),
                kept_why, state=True,
            ),
        ]  # fmt: skip
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
    copied = [FP32 * n for n in owns] * 2 + [item * n for n in owns] + [item * largest]
    parts = [
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
    ]  # fmt: skip
    if launch.accumulation > 1:
        kept = gradients_of_partition(model.groups, launch.processes)
        copied.append(item * kept)
        parts.append(
            MemoryPart(
                "gradients accumulated", item * kept, "host", TRAINING,
                f"{item} B a parameter of its partition where micro batches are accumulated "
                f"({SOURCE}: accumulated_grads_in_cpu)",
            )
        )  # fmt: skip
    if item < FP32 and not launch.cpu:
        parts.append(
            MemoryPart(
                "weights converted for the masters", item * max(owns), "host",
                (Moment.MASTERS,), "a copy in 16 bits before it is converted (Tensor.to)",
            )
        )  # fmt: skip
    if launch.is_pinned("offload_optimizer"):
        parts += [
            MemoryPart(
                "copy for locking pages", FP32 * max(owns), "host",
                (Moment.MASTERS, Moment.BUFFERS), "what is locked is copied (Tensor.pin_memory)",
            ),
            MemoryPart(
                "locked pages beyond the tensors", rounding(copied), "host", since(Moment.BUFFERS),
                f"torch locks pages of up to {LIMIT_MIB} MiB in powers of two "
                "(zerotrain/launch/pinned_memory.py)",
            ),
        ]  # fmt: skip
    return parts
