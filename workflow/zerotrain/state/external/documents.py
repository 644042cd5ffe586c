"""What DeepSpeed's files hold, as far as it is read; a value of another type names file and key."""

from __future__ import annotations

from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from zerotrain.state.external.consistency import read_number
from zerotrain.state.position import ADAM_SLOTS


def _check_flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 1:
        raise ValueError(f"should be a flat tensor, and has the shape {list(tensor.shape)}")
    return tensor


def _check_slots(slots: dict[Any, Any]) -> dict[Any, Any]:
    for name in ADAM_SLOTS:
        if not isinstance(slots.get(name, torch.empty(0)), torch.Tensor):
            raise ValueError(f"{name} should be a tensor")
    if slots.get("step") is not None:
        read_number(slots["step"], "the optimizer", "step")
    return slots


Count = Annotated[int, Field(ge=0)]
Shape = tuple[Count, ...]
Flat = Annotated[torch.Tensor, AfterValidator(_check_flat)]
Slots = Annotated[dict[Any, Any], AfterValidator(_check_slots)]
"""The moments of a flat group, and other values."""


class _Document(BaseModel):
    """A part of a file; keys that are not read are left out."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


class ModelFile(_Document):
    """`mp_rank_00_model_states.pt`."""

    global_steps: Count
    global_samples: Count | None = None
    skipped_steps: Count = 0
    dp_world_size: Count | None = None
    param_shapes: list[dict[str, Shape]] | None = None
    frozen_param_shapes: dict[str, Shape] | None = None
    frozen_param_fragments: dict[str, torch.Tensor] | None = None
    shared_params: dict[str, str] | None = None
    buffer_names: list[str] | None = None
    module: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _frozen_parameters_have_shapes(self) -> Self:
        fragments, shapes = self.frozen_param_fragments or {}, self.frozen_param_shapes or {}
        if fragments and fragments.keys() != shapes.keys():
            raise ValueError("frozen_param_fragments and frozen_param_shapes have different names")
        return self


class Group(_Document):
    """A param group of the optimizer, whose parameters are flat groups."""

    params: list[Count]


class OptimizerState(_Document):
    """The state_dict of the optimizer within ZeRO's."""

    state: dict[Any, Slots]
    param_groups: list[Group]


class OptimizerFile(_Document):
    """`optimizer_state_dict` of a rank's file, of either layout."""

    partition_count: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=1)]]
    zero_stage: Count | None = None
    single_partition_of_fp32_groups: list[Flat] | None = None
    base_optimizer_state: OptimizerState | list[Slots] | None = None
    param_alignment_paddings: list[list[Count]] | None = None
    fp32_flat_groups: list[Flat] | None = None
    optimizer_state_dict: OptimizerState | None = None

    @model_validator(mode="after")
    def _groups_exist(self) -> Self:
        flat = self.fp32_flat_groups
        base: OptimizerState | list[Slots] | None = self.optimizer_state_dict
        if flat is None:
            flat, base = self.single_partition_of_fp32_groups, self.base_optimizer_state
        if flat is None:
            return self  # another layout, which the reader names
        if base is None:
            raise ValueError("the optimizer's state is missing")
        if isinstance(base, list):
            if len(base) != len(flat):
                raise ValueError(f"{len(base)} states of {len(flat)} flat groups")
            return self
        if self.fp32_flat_groups is None and len(base.param_groups) != len(flat):
            raise ValueError(f"{len(base.param_groups)} param groups of {len(flat)} flat groups")
        if any(not group.params or max(group.params) >= len(flat) for group in base.param_groups):
            raise ValueError(f"params of a param group name others than {len(flat)} flat groups")
        return self
