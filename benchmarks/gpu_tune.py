"""What gpu.py --tune measures in turns: defaults that only a GPU can decide, and other values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from gpu_inputs import SMALL_UNET, Training

ROUNDS = 3
DEFAULT = "default"
Arms = dict[str, Training | int | None]
"""A training, or images encoded at a time; None: as many as the default rule gives."""


def small(preset: str, size: int = 1024, **values: Any) -> Training:
    """Return a training of a smaller U-Net, whose set-up takes seconds."""
    return Training("sdxl", preset, size, 8, steps=20, change=SMALL_UNET, **values)


def buckets(elements: int) -> dict[str, int]:
    """Return both buckets of stages 1 and 2."""
    return {"reduce_bucket_size": elements, "allgather_bucket_size": elements}


PREFETCH = "stage3_prefetch_bucket_size"
GROUPS: dict[str, Arms] = {
    "zero2_offload": {
        DEFAULT: small("zero2_offload"),
        "buckets_5M": small("zero2_offload", zero=buckets(5 * 10**6)),
        "buckets_500M": small("zero2_offload", zero=buckets(5 * 10**8)),
        "overlap_comm": small("zero2_offload", zero={"overlap_comm": True}),
        "pageable": small("zero2_offload", zero={"offload_optimizer": {"pin_memory": False}}),
    },
    "zero3_offload": {
        DEFAULT: small("zero3_offload"),
        "no_prefetch": small("zero3_offload", zero={PREFETCH: 0}),
        "prefetch_500M": small("zero3_offload", zero={PREFETCH: 5 * 10**8}),
        "overlap_comm": small("zero3_offload", zero={"overlap_comm": True}),
    },
    "reading": {
        DEFAULT: small("torch", 128),
        "1_reader": small("torch", 128, reading={"READERS": 1}),
        "4_readers": small("torch", 128, reading={"READERS": 4}),
        "2_ahead": small("torch", 128, reading={"MOST_AHEAD": 2}),
    },
    "encoding": {DEFAULT: None, "batch_1": 1, "batch_4": 4, "batch_32": 32},
}
"""Arms that take turns."""


def names(rounds: int = ROUNDS) -> list[tuple[str, Training | int | None]]:
    """Return the name of each measurement with its arm, in the order of the turns.

    A run that is cut has whole rounds of all groups.
    """
    return [
        (f"tune_{group}_{arm}:{number}", what)
        for number in range(1, rounds + 1)
        for group, arms in GROUPS.items()
        for arm, what in arms.items()
    ]


def table(known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each arm: its time over that of the default in the same round, and memory.

    Args:
        known: Lines of a file by their names.
    """

    def cost(line: Mapping[str, Any]) -> float | None:
        if not line.get("ok"):
            return None
        rate = line.get("images_per_second")
        return 1 / rate if rate else line.get("seconds_per_step")

    lines = []
    for group, arms in GROUPS.items():
        for arm in arms:
            ratios, memory = [], []
            for number in range(1, ROUNDS + 1):
                own = known.get(f"tune_{group}_{arm}:{number}", {})
                first = known.get(f"tune_{group}_{DEFAULT}:{number}", {})
                if (took := cost(own)) and (usual := cost(first)):
                    ratios.append(took / usual)
                    memory.append(own["device"]["allocated_mib"])
            if ratios:
                lines.append(
                    f"{group:14} {arm:14} {statistics.median(ratios):.3f} "
                    f"[{min(ratios):.3f}, {max(ratios):.3f}] times the default, "
                    f"{max(memory):.0f} MiB"
                )
    return lines
