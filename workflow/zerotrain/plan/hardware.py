"""What a machine computes and moves in a second: what an estimate of the step's time is made of."""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.plan.storage import Traffic

TFLOPS = {
    "B200": 2250, "H200": 989, "H100": 989, "H800": 989, "A100": 312, "A800": 312, "L40S": 362,
    "L40": 181, "A40": 150, "A10": 125, "L4": 121, "A6000": 155, "V100": 125, "T4": 65,
    "RTX 5090": 210, "RTX 4090": 165, "RTX 4080": 97, "RTX 4070": 58, "RTX 3090": 71,
    "RTX 3080": 59, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip
"""Dense 16-bit products with float32 sums, 1e12 operations a second, by the makers' sheets."""
SHARE_OF_PEAK = 0.4
"""What training steps of large models usually reach of it; an assumption, not a measurement."""
PCIE = 25e9
"""Bytes a second each way: PCIe 4.0 x16 without its overhead."""
HOST_BANDWIDTH = 40e9
"""Bytes a second of a desktop's memory: two channels of DDR4 or DDR5."""
ADAM_BYTES = 48
"""What DeepSpeed's CPU Adam reads and writes a parameter, gradient conversion and copy included."""
DISK = 3e9
"""Bytes a second of an NVMe disk."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what takes them; nothing of it is overlapped."""

    compute: float
    transfer: float
    host_optimizer: float
    disk: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.transfer + self.host_optimizer + self.disk


def find_tflops(name: str) -> float | None:
    """The peak of the GPU of that name; None for one that is not listed."""
    known = sorted(TFLOPS, key=len, reverse=True)
    words = name.upper().replace("GEFORCE ", "").replace("-", " ")
    found = next((key for key in known if key.upper() in words), None)
    return TFLOPS[found] if found else None


def step_time(
    flops: float, peak_tflops: float, traffic: Traffic, host_parameters: int, processes: int
) -> StepTime:
    """Estimate a step.

    Args:
        flops: Operations of a step on one device.
        peak_tflops: The device's peak.
        traffic: What one process moves.
        host_parameters: Parameters that the CPU updates for one process.
        processes: They share the host's memory bandwidth and the disk.
    """
    moved = max(traffic.to_host, traffic.to_device) / PCIE
    return StepTime(
        compute=flops / (peak_tflops * 1e12 * SHARE_OF_PEAK),
        transfer=moved,
        host_optimizer=ADAM_BYTES * host_parameters * processes / HOST_BANDWIDTH,
        disk=(traffic.read + traffic.written) * processes / DISK,
    )
