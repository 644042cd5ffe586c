"""ZeRO stage 3: each parameter is split into equal parts among the ranks, the last one padded.

A rank's parts are concatenated in the flat vector of their sub-group, in the order of
`param_shapes`; a sub-group belongs to one param group. Source: DeepSpeed runtime/zero/stage3.py
(_rigid_state_dict) and checkpoint/ds_to_universal.py (extract_zero_shards_stage3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerotrain.state.external.ranks import Rank, layout_error
from zerotrain.state.position import MASTER

FLAT_GROUPS = "fp32_flat_groups"


class Zero3:
    """The ranks' optimizer files of one checkpoint."""

    def __init__(self, ranks: list[Rank], shapes: list[dict[str, torch.Size]]) -> None:
        self._ranks = ranks
        self.place: dict[str, tuple[int, int, int]] = {}
        """Sub-group, start in the rank's vector and length of each whole parameter."""
        for number, group in enumerate(shapes):
            start = 0
            for name, shape in group.items():
                self.place[name] = (number, start, math.prod(shape))
                start += self._part(math.prod(shape))
            for rank in ranks:
                numel = rank.optimizer[FLAT_GROUPS][number].numel()
                if numel != start:
                    raise layout_error(
                        rank.path,
                        f"sub-group {number} has {numel} elements, its parameters have {start} "
                        "(a checkpoint of NVMe offload keeps them on a disk, and is not read)",
                    )

    def _part(self, length: int) -> int:
        return math.ceil(length / len(self._ranks))

    def _base(self, rank: Rank) -> dict[str, Any]:
        base: dict[str, Any] = rank.optimizer["optimizer_state_dict"]
        return base

    def states(self, rank: Rank) -> list[dict[str, Any]]:
        """Return the optimizer's flat slots on one rank, one dictionary per sub-group."""
        state = self._base(rank)["state"]
        return [state.get(number, {}) for number in range(len(rank.optimizer[FLAT_GROUPS]))]

    def param_groups(self, rank: Rank) -> list[dict[str, Any]]:
        """Return the base optimizer's groups."""
        return list(self._base(rank)["param_groups"])

    def group_names(self, shapes: list[dict[str, torch.Size]]) -> list[list[str]]:
        """Return the parameter names of each param group; its `params` are its sub-groups."""
        return [
            [name for number in group["params"] for name in shapes[number]]
            for group in self.param_groups(self._ranks[0])
        ]

    def pieces(self, name: str, slot: str) -> Iterator[torch.Tensor]:
        """Yield the parts of a flattened parameter, rank by rank, without padding."""
        return (part for _, part in self.parts(name, slot))

    def parts(self, name: str, slot: str) -> Iterator[tuple[Rank, torch.Tensor]]:
        """Yield the parts of a flattened parameter, each with the rank that saved it."""
        number, start, length = self.place[name]
        part = self._part(length)
        for index, rank in enumerate(self._ranks):
            master = rank.optimizer[FLAT_GROUPS][number]
            flat = master if slot == MASTER else self._base(rank)["state"][number][slot]
            yield rank, flat[start : start + max(0, min(part, length - index * part))]


def frozen_pieces(
    models: list[dict[str, Any]], name: str, shape: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Yield the parts of a frozen parameter from the ranks' model files."""
    length = math.prod(shape)
    part = math.ceil(length / len(models))
    for index, model in enumerate(models):
        yield model["frozen_param_fragments"][name][: max(0, length - index * part)]
