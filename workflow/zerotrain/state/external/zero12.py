"""ZeRO stages 1 and 2: each param group is one flat vector, split into equal parts among the ranks.

The vector concatenates the group's parameters, in the order of `param_shapes`; the last rank's part
is saved without its padding. Source: DeepSpeed runtime/zero/stage_1_and_2.py (state_dict) and
utils/zero_to_fp32.py (_zero2_merge_trainable_params).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from zerotrain.state.external.ranks import Rank, layout_error
from zerotrain.state.position import MASTER

FLAT_GROUPS = "single_partition_of_fp32_groups"
ALIGNMENTS = "param_alignment_paddings"


class Zero12:
    """The ranks' optimizer files of one checkpoint."""

    def __init__(self, ranks: list[Rank], shapes: list[dict[str, torch.Size]]) -> None:
        self._ranks = ranks
        self.place: dict[str, tuple[int, int, int]] = {}
        """Group, start in the group's vector and length of each parameter."""
        alignments = ranks[0].optimizer.get(ALIGNMENTS) or [[0] * len(group) for group in shapes]
        for number, (group, paddings) in enumerate(zip(shapes, alignments, strict=True)):
            start = 0
            for (name, shape), padding in zip(group.items(), paddings, strict=True):
                self.place[name] = (number, start, math.prod(shape))
                start += math.prod(shape) + padding
            self._check(number, start)

    def _check(self, number: int, needed: int) -> None:
        lengths = [len(rank.optimizer[FLAT_GROUPS][number]) for rank in self._ranks]
        unit = 2 * len(self._ranks)  # groups are padded to it, and the padding is removed on saving
        if math.ceil(sum(lengths) / unit) != math.ceil(needed / unit):
            raise layout_error(
                self._ranks[-1].path,
                f"param group {number} has {sum(lengths)} elements on all ranks, its parameters "
                f"have {needed}",
            )
        for rank, length in zip(self._ranks[:-1], lengths[:-1], strict=True):
            if length != lengths[0]:
                raise layout_error(
                    rank.path, f"param group {number} has {length} elements, rank 0's {lengths[0]}"
                )

    def states(self, rank: Rank) -> list[dict[str, Any]]:
        """Return the optimizer's flat slots on one rank, one dictionary per group."""
        base = rank.optimizer["base_optimizer_state"]
        if not isinstance(base, dict):  # "elastic_checkpoint": only the states
            return list(base)
        return [base["state"].get(group["params"][0], {}) for group in base["param_groups"]]

    def param_groups(self, rank: Rank) -> list[dict[str, Any]]:
        """Return the base optimizer's groups; "elastic" checkpoints have none."""
        base = rank.optimizer["base_optimizer_state"]
        return list(base["param_groups"]) if isinstance(base, dict) else []

    def group_names(self, shapes: list[dict[str, torch.Size]]) -> list[list[str]]:
        """Return the parameter names of each param group."""
        return [list(group) for group in shapes]

    def pieces(self, name: str, slot: str) -> Iterator[torch.Tensor]:
        """Yield the parts of a flattened parameter, rank by rank."""
        return (part for _, part in self.parts(name, slot))

    def parts(self, name: str, slot: str) -> Iterator[tuple[Rank, torch.Tensor]]:
        """Yield the parts of a flattened parameter, each with the rank that saved it."""
        number, start, length = self.place[name]
        size = len(self._ranks[0].optimizer[FLAT_GROUPS][number])
        for index in range(start // max(size, 1), len(self._ranks)):
            first = index * size
            if first >= start + length:
                return
            rank = self._ranks[index]
            master = rank.optimizer[FLAT_GROUPS][number]
            flat = master if slot == MASTER else self.states(rank)[number][slot]
            yield rank, flat[max(start - first, 0) : min(start + length - first, len(master))]
