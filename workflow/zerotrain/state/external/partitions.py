"""What ZeRO's ranks save of the optimizer: flat vectors, and where each parameter is in them.

Source: DeepSpeed runtime/zero/stage_1_and_2.py (state_dict), runtime/zero/stage3.py
(_rigid_state_dict), utils/zero_to_fp32.py (_zero2_merge_trainable_params) and
checkpoint/ds_to_universal.py (extract_zero_shards_stage3).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from zerotrain.state.external.ranks import Rank, layout_error
from zerotrain.state.position import MASTER

ALIGNMENTS = "param_alignment_paddings"


class Partitions(ABC):
    """The ranks' optimizer files of one checkpoint."""

    FLAT_GROUPS: ClassVar[str]
    """The key of the flat master weights in a rank's file."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks
        self.place: dict[str, tuple[int, int, int]] = {}
        """Flat group, start in its vector and length of each whole parameter."""

    @abstractmethod
    def states(self, rank: Rank) -> list[dict[str, Any]]:
        """Return the optimizer's flat slots on one rank, one dictionary per flat group."""

    @abstractmethod
    def param_groups(self, rank: Rank) -> list[dict[str, Any]]:
        """Return the base optimizer's groups; "elastic" checkpoints have none."""

    @abstractmethod
    def group_names(self, shapes: list[dict[str, torch.Size]]) -> list[list[str]]:
        """Return the parameter names of each param group."""

    @abstractmethod
    def parts(self, name: str, slot: str) -> Iterator[tuple[Rank, torch.Tensor]]:
        """Yield the parts of a flattened parameter, each with the rank that saved it."""

    def pieces(self, name: str, slot: str) -> Iterator[torch.Tensor]:
        """Yield the parts of a flattened parameter, rank by rank, without padding."""
        return (part for _, part in self.parts(name, slot))


class Zero12(Partitions):
    """Stages 1 and 2: each param group is one flat vector, split into equal parts among the ranks.

    The vector concatenates the group's parameters, in the order of `param_shapes`; the last rank's
    part is saved without its padding.
    """

    FLAT_GROUPS = "single_partition_of_fp32_groups"

    def __init__(self, ranks: list[Rank], shapes: list[dict[str, torch.Size]]) -> None:
        super().__init__(ranks)
        alignments = ranks[0].optimizer.get(ALIGNMENTS) or [[0] * len(group) for group in shapes]
        if [*map(len, alignments)] != [*map(len, shapes)]:
            raise layout_error(
                ranks[0].path, f"{ALIGNMENTS} and the parameters differ in their numbers"
            )
        for number, (group, paddings) in enumerate(zip(shapes, alignments, strict=True)):
            start = 0
            for (name, shape), padding in zip(group.items(), paddings, strict=True):
                self.place[name] = (number, start, math.prod(shape))
                start += math.prod(shape) + padding
            self._check(number, start)

    def _check(self, number: int, needed: int) -> None:
        lengths = [len(rank.optimizer[self.FLAT_GROUPS][number]) for rank in self._ranks]
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
        base = rank.optimizer["base_optimizer_state"]
        if not isinstance(base, dict):  # "elastic_checkpoint": only the states
            return list(base)
        return [base["state"].get(group["params"][0], {}) for group in base["param_groups"]]

    def param_groups(self, rank: Rank) -> list[dict[str, Any]]:
        base = rank.optimizer["base_optimizer_state"]
        return list(base["param_groups"]) if isinstance(base, dict) else []

    def group_names(self, shapes: list[dict[str, torch.Size]]) -> list[list[str]]:
        return [list(group) for group in shapes]

    def parts(self, name: str, slot: str) -> Iterator[tuple[Rank, torch.Tensor]]:
        number, start, length = self.place[name]
        size = len(self._ranks[0].optimizer[self.FLAT_GROUPS][number])
        for index in range(start // max(size, 1), len(self._ranks)):
            first = index * size
            if first >= start + length:
                return
            rank = self._ranks[index]
            master = rank.optimizer[self.FLAT_GROUPS][number]
            flat = master if slot == MASTER else self.states(rank)[number][slot]
            yield rank, flat[max(start - first, 0) : min(start + length - first, len(master))]


class Zero3(Partitions):
    """Stage 3: each parameter is split into equal parts among the ranks, the last one padded.

    A rank's parts are concatenated in the flat vector of their sub-group, in the order of
    `param_shapes`; a sub-group belongs to one param group.
    """

    FLAT_GROUPS = "fp32_flat_groups"

    def __init__(self, ranks: list[Rank], shapes: list[dict[str, torch.Size]]) -> None:
        super().__init__(ranks)
        for number, group in enumerate(shapes):
            start = 0
            for name, shape in group.items():
                self.place[name] = (number, start, math.prod(shape))
                start += self._part(math.prod(shape))
            for rank in ranks:
                numel = rank.optimizer[self.FLAT_GROUPS][number].numel()
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
        state = self._base(rank)["state"]
        return [state.get(number, {}) for number in range(len(rank.optimizer[self.FLAT_GROUPS]))]

    def param_groups(self, rank: Rank) -> list[dict[str, Any]]:
        return list(self._base(rank)["param_groups"])

    def group_names(self, shapes: list[dict[str, torch.Size]]) -> list[list[str]]:
        # The `params` of a group are its sub-groups.
        return [
            [name for number in group["params"] for name in shapes[number]]
            for group in self.param_groups(self._ranks[0])
        ]

    def parts(self, name: str, slot: str) -> Iterator[tuple[Rank, torch.Tensor]]:
        number, start, length = self.place[name]
        part = self._part(length)
        for index, rank in enumerate(self._ranks):
            master = rank.optimizer[self.FLAT_GROUPS][number]
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
