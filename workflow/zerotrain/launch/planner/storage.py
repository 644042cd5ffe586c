"""Bytes on disks, those of a cache among them, bytes transferred between host and device in each
step, and the step's time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from zerotrain.config.families import FAMILIES
from zerotrain.launch.planner.architecture import Architecture, Part
from zerotrain.launch.planner.buckets import (
    flat_sizes,
    gradients_of_partition,
    partitioned_numel,
    sub_groups,
)
from zerotrain.launch.planner.gpus import Gpu
from zerotrain.launch.planner.inputs import FP32, ParameterSizes, PlannedLaunch
from zerotrain.launch.planner.memory_zero3 import swap_file_bytes
from zerotrain.launch.planner.shape import (
    Shape,
    adds_channels,
    pixels_per_latent,
    prompt_shapes,
)

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SHARE_OF_PEAK = 0.4
"""Typical share of the peak in training steps of large models; an assumption, not a measurement."""
HOST_BANDWIDTH = 40e9
"""Bytes per second of a desktop's memory: two channels of DDR4 or DDR5."""
ADAM_BYTES = 48
"""Bytes that DeepSpeed's CPU Adam reads and writes per parameter, including conversion and copy."""
DISK = 3e9
"""Bytes per second of an NVMe disk."""


@dataclass(frozen=True)
class Storage:
    """Bytes on a disk: the permanent ones, and the peak while they are written.

    Attributes:
        name: Name of the files.
        bytes: Bytes that stay.
        spike: The peak: a new file is complete before the old one is removed.
        why: Its arithmetic.
    """

    name: str
    bytes: int
    spike: int
    why: str


def storage(launch: PlannedLaunch, model: ParameterSizes, dtype: str) -> list[Storage]:
    """Return a phase's bytes on disk, tensors only; a header is a few KB per shard.

    The published checkpoint is a second name of the newest rolling one, so it takes no space if the
    file system has hard links (zerotrain/stages/train_phase.py: _publish).

    Args:
        launch: The launch's values.
        model: The model's sizes.
        dtype: Type of the exported weights: fp32, bf16 or fp16.
    """
    slots = launch.slots + launch.average
    state = FP32 * (1 + slots) * model.trained_numel
    # The weights of an adapter would be smaller; the whole model is the upper bound.
    weights = DTYPE_BYTES[dtype] * model.numel
    each = f"{FP32} B x (1 + {slots}) a trained parameter"
    return [
        Storage(
            "rolling checkpoints", launch.keep * state, (launch.keep + 1) * state,
            f"keep: {launch.keep} x {each}; one more while it is written "
            "(zerotrain/training/checkpointing/saving.py)",
        ),
        Storage(
            "state", state, 2 * state,
            f"{each}; a state that is exported again is whole before the old one is removed "
            "(zerotrain/artifact/publication.py)",
        ),
        Storage(
            "weights", weights, 2 * weights,
            f"{DTYPE_BYTES[dtype]} B a parameter; twice while they are exported again",
        ),
    ]  # fmt: skip


def swap_files(launch: PlannedLaunch, model: ParameterSizes) -> dict[str, int]:
    """Return the bytes of all processes on the disk of offload_path, by content."""
    groups = sub_groups(model.groups, launch.processes, int(launch.value("sub_group_size")))
    own = swap_file_bytes(launch, model, groups)
    return {name: launch.processes * size for name, size in own.items()}


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process transfers in a step.

    Attributes:
        to_host: From its device to the host.
        to_device: From the host to its device.
        read: From the disk of offload_path.
        written: To the disk of offload_path.
    """

    to_host: int = 0
    to_device: int = 0
    read: int = 0
    written: int = 0


def traffic(launch: PlannedLaunch, model: ParameterSizes) -> Traffic:
    """Return a step's transfers, without its batch, as DeepSpeed 0.19.8 performs them.

    The minimum is 2 B per parameter each way; gradients are transferred as float32, and stage 3
    transfers them back once more (stage_1_and_2.py: copy_grads_in_partition and step; stage3.py:
    partition_grads).
    """
    if launch.cpu or launch.engine == "torch":
        return Traffic()
    item, micro = launch.item, launch.accumulation
    if launch.stage < 3:
        if launch.offload_optimizer == "none":
            return Traffic()
        own = sum(flat_sizes(model.groups, launch.processes)) // launch.processes
        whole = gradients_of_partition(model.groups, launch.processes)
        # With several micro batches, each stores the sum; all but the first fetch it.
        stored = micro * item * whole if micro > 1 else 0
        fetched = (micro - 1) * item * whole
        return Traffic(FP32 * own + stored, item * own + fetched)
    own = partitioned_numel((n for group in model.groups for n in group), launch.processes)
    every = partitioned_numel(model.parameters.values(), launch.processes)
    to_host = to_device = 0
    if launch.offload_optimizer != "none":
        to_host = micro * item * own + FP32 * own
        to_device = micro * item * own
    if launch.offload_param != "none":
        to_device += 2 * micro * item * every
    elif launch.offload_optimizer != "none":
        to_device += item * own
    files = swap_files(launch, model)
    states = (files.get("masters", 0) + files.get("optimizer states", 0)) // launch.processes
    gradients = files.get("gradients", 0) // launch.processes
    weights = files.get("weights", 0) // launch.processes
    return Traffic(
        to_host, to_device, states + gradients + 2 * micro * weights, states + gradients + weights
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by kind of work, without any overlap."""

    compute: float
    transfer: float
    host_optimizer: float
    disk: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.transfer + self.host_optimizer + self.disk


def step_time(
    flops: float, gpu: Gpu, traffic: Traffic, host_parameters: int, processes: int
) -> StepTime:
    """Estimate a step.

    Args:
        flops: Operations of a step on one device.
        gpu: The device.
        traffic: Transfers of one process.
        host_parameters: Parameters that the CPU updates for one process.
        processes: Number of processes, which share the host's memory bandwidth and the disk.
    """
    moved = max(traffic.to_host, traffic.to_device) / gpu.host_bandwidth
    return StepTime(
        compute=flops / (gpu.tflops * 1e12 * SHARE_OF_PEAK),
        transfer=moved,
        host_optimizer=ADAM_BYTES * host_parameters * processes / HOST_BANDWIDTH,
        disk=(traffic.read + traffic.written) * processes / DISK,
    )


def cached_bytes(
    architecture: Architecture, shape: Shape, dtype: str, *, flips: bool
) -> tuple[int, int]:
    """Return the bytes of a sample's latents and a caption's embeddings; 0 for language models.

    Args:
        architecture: The model.
        shape: Resolution and tokens; the batch is not used.
        dtype: The cache's type: fp32, bf16 or fp16.
        flips: Whether each image's mirror image is also encoded (data.random_flip).
    """
    if FAMILIES[architecture.family].modality == "text":
        return 0, 0
    text = sum(map(prod, prompt_shapes(architecture, shape).values()))
    latents = (1 + flips) * _latent_numel(architecture, shape)
    return DTYPE_BYTES[dtype] * latents, DTYPE_BYTES[dtype] * text


def conditioning_bytes(architecture: Architecture, shape: Shape, dtype: str) -> int:
    """Return the bytes of one sample's encoded conditioning images; arguments as above."""
    if not shape.conditioning_images:
        return 0
    if adds_channels(architecture):  # the masked image's latents, and the mask's pixels
        mask = shape.resolution**2
        return DTYPE_BYTES[dtype] * (_latent_numel(architecture, shape) + mask)
    return DTYPE_BYTES[dtype] * shape.conditioning_images * _latent_numel(architecture, shape)


def _latent_numel(architecture: Architecture, shape: Shape) -> int:
    """Return the elements of the latents of one image."""
    config = architecture.trained.config
    channels = FAMILIES[architecture.family].latent_channels(config)
    return int(channels * (shape.resolution // pixels_per_latent(architecture)) ** 2)


def parameters_of(part: Part, source: str) -> int:
    """Return the number of a part's parameters, tied ones once; build it if no count is shipped.

    Raises:
        PipelineError: it cannot be built.
    """
    if part.parameters is not None:
        return part.parameters
    from zerotrain.launch.planner.model import build_part  # building a part needs torch

    return sum(p.numel() for p in build_part(part, source).parameters())


def encoder_bytes(architecture: Architecture, dtype: str) -> dict[str, int]:
    """Return the bytes of each part that the cache stage loads; training loads none of them.

    The device has either the autoencoder or the text encoders
    (zerotrain/models/families/pipelines.py: PipelineEncoders); the host loads all.

    Args:
        architecture: The model.
        dtype: Type of the text encoders: the cache's, or fp32 on a CPU. The autoencoder is fp32.
    """
    return {
        name: (FP32 if name == "vae" else DTYPE_BYTES[dtype])
        * parameters_of(part, architecture.source)
        for name, part in architecture.encoders.items()
    }
