"""Clipping of each gradient value under DeepSpeed, which lacks it."""

from __future__ import annotations

from typing import Any


def clip_each_value(zero: Any, bound: float, stage: int) -> None:
    """Make a ZeRO optimizer clamp every value of its gradients to [-bound, bound].

    DeepSpeed (0.19) passes each partition of the averaged, accumulated float32 gradient through
    `unscale_and_clip_grads` right before its step, after the check for infinite values. Its own
    clipping by norm must be off: gradient_clipping 0.
    """
    unscale = zero.unscale_and_clip_grads

    def unscale_and_clamp(partitions: Any, total_norm: Any) -> None:
        unscale(partitions, total_norm)
        if stage == 3:  # its argument is the number of a sub-group
            partitions = [zero.fp32_partitioned_groups_flat[partitions].grad]
        for partition in partitions:
            for gradient in partition if isinstance(partition, list) else [partition]:
                gradient.data.clamp_(-bound, bound)

    zero.unscale_and_clip_grads = unscale_and_clamp
