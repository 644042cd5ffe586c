"""Memory of ZeRO stage 3, as DeepSpeed 0.19.8 allocates it, part by part.

What is swapped to a disk follows deepspeed/runtime/swap_tensor/*.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.launch.planner.buckets import (
    Coordinator,
    largest_fill,
    live_parameters,
    partitioned_numel,
    round_up,
    sub_groups,
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
from zerotrain.launch.zero import cached_bytes, rounding

SOURCE = "deepspeed/runtime/zero/stage3.py"
NORM_ELEMENTS = 250_000_000
"""Most elements whose norm is computed at once (stage3.py: _constant_buffered_norm2)."""
LEAST_BYTES = 2**20
"""Least bytes of a swapped tensor (utils.py: MIN_AIO_BYTES; aio.block_size is no larger)."""
ALIGNED_BYTES = 1024
"""utils.py: AIO_ALIGNED_BYTES, with the default of one thread per request."""


def zero3_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the parts of one process, without activations; some may have no bytes."""
    item, processes = launch.item, launch.processes
    own = partitioned_numel((n for group in model.groups for n in group), processes)
    groups = sub_groups(model.groups, processes, int(launch.value("sub_group_size")))
    swapped = SwappedElements.of(launch, model, groups)
    optimizer: Place = "device" if launch.offload_optimizer == "none" else "host"
    weights: Place = "device" if launch.offload_param == "none" else "host"
    in_memory = sum(groups) - swapped.optimizer
    copied = item < FP32 or (optimizer == "host" and not launch.cpu)
    return [
        MemoryPart(
            "weights", item * (own - swapped.weights), weights, since(Moment.FLATTEN),
            f"{item} B a parameter of its partition ({SOURCE}: lp_param_buffer, "
            "param_groups_fp16_flat_cpu_memory)", state=True,
        ),
        MemoryPart(
            "weights before they are cut",
            item * (max(model.parameters.values()) if launch.init else model.numel),
            "device", (Moment.PLACE,),
            f"{item} B an element of the largest parameter (zero.Init)" if launch.init else
            f"{item} B a parameter (deepspeed/runtime/engine.py: _configure_distributed_model)",
        ),
        MemoryPart(
            "weights before they are flat", item * own, "host", (Moment.FLATTEN,),
            f"{item} B a parameter of its partition ({SOURCE}, utils.py: defragment)",
        ),
        MemoryPart(
            "masters", FP32 * in_memory, optimizer, since(Moment.MASTERS),
            f"4 B a parameter of its partition ({SOURCE}: _create_fp32_partitions)", state=True,
        ),
        MemoryPart(
            "optimizer states", launch.slots * launch.slot_item * in_memory, optimizer, TRAINING,
            f"{launch.slots} x {launch.slot_item} B a parameter of its partition, at the first "
            "step",
            state=True,
        ),
        MemoryPart(
            "gradients" if optimizer == "device" else "gradients in the type of the weights",
            item * own, optimizer, since(Moment.BUCKETS),
            f"{item} B a parameter of its partition, never freed ({SOURCE}: "
            "grad_partitions_flat_buffer)", state=optimizer == "device",
        ),
        MemoryPart(
            "zeros for the states", FP32 * max(groups), optimizer, (Moment.BUFFERS,),
            f"4 B a parameter of the largest sub-group ({SOURCE}: initialize_optimizer_states)",
        ),
        MemoryPart(
            "weights in parts", item * own * launch.init, weights, (Moment.PLACE,),
            f"{item} B a parameter of its partition (partition_parameters.py)",
        ),
        MemoryPart(
            "frozen weights", item * partitioned_numel(model.frozen, processes), weights,
            since(Moment.PLACE if launch.init else Moment.FLATTEN),
            f"{item} B a frozen parameter of its partition (partition_parameters.py)",
            state=True,
        ),
        MemoryPart(
            "masters before they are copied", FP32 * max(groups) * copied, optimizer,
            (Moment.MASTERS,), f"4 B a parameter of a sub-group ({SOURCE}: converted.clone)",
        ),
        *_bucket_parts(launch, model),
        *_live_parts(launch, model),
        *(
            _offloaded_parts(launch, model, groups, in_memory)
            if optimizer == "host"
            else _step_parts(launch, model, max(groups))
        ),
        *_locked_parts(launch, model),
        *_swap_parts(launch, groups, swapped),
    ]  # fmt: skip


def _locked_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return what page-locked weights take beyond their own bytes."""
    locked = launch.offload_param != "none" and launch.is_pinned("offload_param")
    trained, others = (
        [launch.item * -(-n // launch.processes) for n in numels]
        for numels in ((n for group in model.groups for n in group), model.frozen)
    )
    flats = [launch.item * partitioned_numel(group, launch.processes) for group in model.groups]
    return [
        MemoryPart(
            "locked pages beyond the weights", (rounding(flats) + rounding(others)) * locked,
            "host", since(Moment.FLATTEN), LOCKED,
        ),
        MemoryPart(
            "locked pages of the weights before they were flat", cached_bytes(trained) * locked,
            "host", since(Moment.FLATTEN, Moment.BUCKETS),
            "torch keeps them until the engine is ready "
            "(zerotrain/training/engines/zero_engine.py)",
        ),
    ]  # fmt: skip


def _bucket_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    bucket, item = int(launch.value("reduce_bucket_size")), launch.item
    held = largest_fill(model.backward_order, bucket)
    why = f"reduce_bucket_size x {item} B, never freed ({SOURCE}: _setup_for_real_optimizer)"
    when = (Moment.REDUCE,)
    return [
        MemoryPart("reduce bucket", item * bucket, "device", (Moment.BUCKETS,), why, touched=0),
        MemoryPart("reduce bucket", item * bucket, "device", TRAINING, why, touched=item * held),
        MemoryPart(
            "copy of the bucket", item * held, "device", when,
            "its gradients in the order of the processes (deepspeed/runtime/comm/"
            "coalesced_collectives.py: reduce_scatter_coalesced)",
        ),
        MemoryPart(
            "gloo's copy of the bucket", item * held * launch.cpu, "device", when,
            "gloo, which a CPU's processes talk through, reduces a copy",
        ),
    ]  # fmt: skip


def _live_parts(launch: PlannedLaunch, model: ParameterSizes) -> list[MemoryPart]:
    """Return the whole parameters, unless the weights are whole on the device already."""
    if launch.processes == 1 and (launch.offload_param == "none" or launch.cpu):
        return []
    item = launch.item
    threshold = int(launch.value("stage3_param_persistence_threshold"))
    ceiling = int(launch.value("stage3_model_persistence_threshold"))
    kept = 0
    for numel in model.parameters.values():
        if numel <= threshold and kept + numel <= ceiling:
            kept += numel
    live = live_parameters(
        tuple(tuple(model.parameters[name] for name in names) for names in model.modules),
        Coordinator(
            prefetch=int(launch.value("stage3_prefetch_bucket_size")),
            max_live=int(launch.value("stage3_max_live_parameters")),
            reuse=int(launch.value("stage3_max_reuse_distance")),
            kept=threshold,
            bucket=int(launch.value("reduce_bucket_size")),
            gathers=launch.processes > 1,
            copies=launch.cpu,
        ),
    )
    peaks = {
        Moment.FORWARD: live.forward,
        Moment.BACKWARD: live.backward,
        Moment.REDUCE: live.reducing,
    }
    return [
        MemoryPart(
            "persistent parameters", item * kept, "device", TRAINING,
            f"{item} B a parameter of stage3_param_persistence_threshold elements or fewer "
            "(parameter_offload.py: mark_persistent_parameters)",
        ),
        *(
            MemoryPart(
                "live parameters", item * numel, "device", (moment,),
                f"{item} B: stage3_max_live_parameters, stage3_max_reuse_distance and "
                "stage3_prefetch_bucket_size over this model, with the buffers of gathering "
                "(partitioned_param_coordinator.py)",
            )
            for moment, numel in peaks.items()
        ),
    ]  # fmt: skip


def _step_parts(launch: PlannedLaunch, model: ParameterSizes, group: int) -> list[MemoryPart]:
    """Return the temporaries of the update if the optimizer is on the device."""
    item = launch.item
    why = f"B a parameter of a sub-group ({SOURCE}: _prepare_fp32_grad_for_sub_group)"
    return [
        MemoryPart(
            "norm of the largest gradient", NORM * -(-model.largest // launch.processes),
            "device", (Moment.CLIP,), f"8 B an element ({SOURCE}: get_grad_norm_direct)",
        ),
        MemoryPart(
            "gradients made flat", item * group, "device", (Moment.STEP,), f"{item} {why}"
        ),
        MemoryPart(
            "gradients in float32", FP32 * group * (item < FP32), "device", (Moment.STEP,),
            f"4 {why}",
        ),
    ]  # fmt: skip


def _offloaded_parts(
    launch: PlannedLaunch, model: ParameterSizes, groups: list[int], in_memory: int
) -> list[MemoryPart]:
    """Return gradients and temporaries if the optimizer is on the host or swapped from there."""
    own = -(-model.largest // launch.processes)
    sizes = [launch.item * sum(groups)]
    sizes += [FP32 * group for group in groups] if launch.offload_optimizer == "cpu" else []
    return [
        MemoryPart(
            "gradients", FP32 * in_memory, "host", since(Moment.BUFFERS),
            f"4 B a parameter of its partition, never freed ({SOURCE}: "
            "initialize_optimizer_states)", state=True,
        ),
        MemoryPart(
            "norm of the largest gradient", NORM * min(own, NORM_ELEMENTS), "device",
            (Moment.BACKWARD, Moment.REDUCE), f"8 B an element ({SOURCE}: "
            "_constant_buffered_norm2)",
        ),
        MemoryPart(
            "locked pages beyond the gradients",
            rounding(sizes) * launch.is_pinned("offload_optimizer"), "host",
            since(Moment.BUFFERS), LOCKED,
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class SwappedElements:
    """Elements that a process swaps.

    Attributes:
        optimizer: Elements whose masters, moments and gradients are swapped.
        weights: Elements of the trained weights that are on the disk and not in memory.
        kept: Elements of the largest sub-group among these, which is written at once; 0 if there is
            no such sub-group.
    """

    optimizer: int = 0
    weights: int = 0
    kept: int = 0

    @classmethod
    def of(cls, launch: PlannedLaunch, model: ParameterSizes, groups: list[int]) -> SwappedElements:
        """Return the values for a launch; `groups` are the elements of the sub-groups.

        The first offload_param.max_in_cpu elements stay in host memory whatever the device setting
        (stage3.py: _create_param_groups_fp16_flat_cpu_memory).
        """
        swapped = launch.offload_optimizer == "nvme"
        optimizer = sum(g for g in groups if FP32 * g >= LEAST_BYTES) if swapped else 0
        if launch.offload_param != "nvme":
            return cls(optimizer)
        room, out = int(launch.offload("offload_param", "max_in_cpu")), []
        held = 0
        for group in groups:
            held += group
            if held > room:
                out.append(group)
        return cls(optimizer, sum(out), max(out, default=0))


def _swap_parts(
    launch: PlannedLaunch, groups: list[int], swapped: SwappedElements
) -> list[MemoryPart]:
    """Return the host memory for swapping; aio locks it itself, without rounding."""

    def buffers(target: str, size: int) -> int:
        if getattr(launch, target) != "nvme":
            return 0
        return int(launch.offload(target, "buffer_count")) * round_up(size, ALIGNED_BYTES)

    size = int(launch.offload("offload_param", "buffer_size"))
    return [
        MemoryPart(
            "buffers of the optimizer's swapping", buffers("offload_optimizer", FP32 * max(groups)),
            "host", since(Moment.MASTERS),
            "buffer_count x 4 B a parameter of the largest sub-group (optimizer_utils.py: "
            "SwapBufferManager)",
        ),
        MemoryPart(
            "buffers of the weights' swapping", buffers("offload_param", launch.item * size),
            "host", since(Moment.PLACE),
            f"buffer_count x buffer_size x {launch.item} B (partitioned_param_swapper.py)",
        ),
        MemoryPart(
            "weights on their way to the disk", launch.item * swapped.kept, "host",
            since(Moment.FLATTEN), f"{launch.item} B a parameter of the largest sub-group "
            "(partitioned_param_swapper.py: reserve_partitioned_swap_space)",
        ),
    ]  # fmt: skip


def swap_file_bytes(
    launch: PlannedLaunch, model: ParameterSizes, groups: list[int]
) -> dict[str, int]:
    """Return the bytes of one process's swap files by content; for gradients an upper bound."""
    sizes: dict[str, int] = {}
    if launch.offload_optimizer == "nvme":
        big = [FP32 * group for group in groups if FP32 * group >= LEAST_BYTES]
        each = sum(round_up(size, ALIGNED_BYTES) for size in big)
        sizes["masters"] = each
        sizes["optimizer states"] = launch.slots * each
        cuts = [FP32 * -(-n // launch.processes) for group in model.groups for n in group]
        sizes["gradients"] = sum(s - s % ALIGNED_BYTES for s in cuts if s >= LEAST_BYTES)
    if launch.offload_param == "nvme":
        cuts = [launch.item * -(-n // launch.processes) for n in model.parameters.values()]
        sizes["weights"] = sum(round_up(s, ALIGNED_BYTES) for s in cuts if s >= LEAST_BYTES)
    return sizes
