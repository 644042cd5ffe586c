"""Speed of a machine's hardware, from which a step's time is estimated."""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.launch.planner.gpus import Gpu
from zerotrain.launch.planner.storage import Traffic

SHARE_OF_PEAK = 0.4
"""Typical share of the peak in training steps of large models; an assumption, not a measurement."""
HOST_BANDWIDTH = 40e9
"""Bytes per second of a desktop's memory: two channels of DDR4 or DDR5."""
ADAM_BYTES = 48
"""Bytes that DeepSpeed's CPU Adam reads and writes per parameter, including conversion and copy."""
DISK = 3e9
"""Bytes per second of an NVMe disk."""


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
