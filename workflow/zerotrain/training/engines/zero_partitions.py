"""ZeRO's partitions of master weights and optimizer state, read and filled by parameter name.

DeepSpeed flattens the parameters of a group into partitions, one per process. Both classes find a
parameter's part of this process's partition, whatever its padding, by DeepSpeed's own addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm

from zerotrain.state.checkpoint import Fragment
from zerotrain.state.position import MASTER
from zerotrain.state.state import FillPart

CreateState = Callable[[torch.Tensor, int], dict[str, Any]]
"""Returns the optimizer's state for a flat tensor and its group."""


class GroupPartitions:
    """Stages 1 and 2: a process holds one contiguous partition of each group's parameters.

    A parameter may span several processes' partitions, or be entirely in another process's.
    """

    def __init__(self, zero: Any, trained: Mapping[str, torch.nn.Parameter]) -> None:
        self._zero = zero
        self._trained = trained

    def flats(self) -> list[list[torch.Tensor]]:
        """Return the flat tensors of each group, which the optimizer steps."""
        return [[flat] for flat in self._zero.single_partition_of_fp32_groups]

    def create_states(self, create: CreateState) -> None:
        """Give the optimizer a state for each flat tensor, before the first step has made one."""
        for group, flat in enumerate(self._zero.single_partition_of_fp32_groups):
            self._zero.optimizer.state[flat] = create(flat, group)

    def fragments(self, slots: Sequence[str]) -> Iterator[Fragment]:
        """Yield this process's part of each parameter that it has a part of."""
        if slots:
            self._link_slots()
        for name, mapping in self._mappings():
            parts = {MASTER: mapping.get_hp_fragment()}
            parts.update((slot, mapping.get_optim_state_fragment(slot).float()) for slot in slots)
            yield Fragment(name, mapping.lp_fragment_address.start, parts)

    def fill_masters(self, fill: FillPart) -> None:
        """Set the master weights."""
        for name, mapping in self._mappings():
            fill(name, MASTER, mapping.lp_fragment_address.start, mapping.get_hp_fragment().data)

    def show_masters(self) -> None:
        """Copy the master weights, rounded, to the weights that the model computes with."""
        self._zero.update_lp_params()

    def fill_moments(self, fill: FillPart, slots: Sequence[str]) -> None:
        """Set the optimizer's slots; its states must be there."""
        self._link_slots()
        for name, mapping in self._mappings():
            start = mapping.lp_fragment_address.start
            for slot in slots:
                fill(name, slot, start, mapping.get_optim_state_fragment(slot).data)

    def _mappings(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._trained.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:  # else the parameter is entirely in other processes' partitions
                yield name, mapping

    def _link_slots(self) -> None:
        # DeepSpeed links the slots only once, at the first step; of several groups it links only
        # group 0.
        self._zero._hp_optimizer_states_linked = False
        self._zero._lazy_init_hp_params_optimizer_state()


class ParameterPartitions:
    """Stage 3: every parameter is cut into equal parts, one per process, the last one padded.

    The parts of a sub-group share one flat tensor. Under NVMe offload it is on the disk, and empty
    here except while its sub-group is swapped in.
    """

    def __init__(
        self, zero: Any, trained: Mapping[str, torch.nn.Parameter], shapes: dict[str, list[int]]
    ) -> None:
        self._zero = zero
        self._sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        self._groups: dict[int, dict[str, torch.nn.Parameter]] = {}
        for name, parameter in trained.items():
            group = zero.grad_position[zero.get_param_id(parameter)][0]
            self._groups.setdefault(group, {})[name] = parameter

    def flats(self) -> list[list[torch.Tensor]]:
        """Return the flat tensors of each group, which the optimizer steps."""
        flats_by_group: list[list[torch.Tensor]] = [[] for _ in self._zero.optimizer.param_groups]
        for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            flats_by_group[self._zero.sub_group_to_group_id[number]].append(flat)
        return flats_by_group

    def create_states(self, create: CreateState) -> None:
        """Give the optimizer a state for each flat tensor, before the first step has made one."""
        for number in self._groups:
            group = self._zero.sub_group_to_group_id[number]
            with self._resident(number, changed=True) as flat:
                self._zero.optimizer.state[flat] = create(flat, group)

    def fragments(self, slots: Sequence[str]) -> Iterator[Fragment]:
        """Yield this process's part of each parameter, without its padding."""
        for group, parameters in self._groups.items():
            with self._resident(group) as flat:
                held = {MASTER: flat.data, **self._moments(flat, slots)}
                for name, parameter in parameters.items():
                    start, length = self._span(name, parameter)
                    if length:
                        first = self._offset(parameter)
                        parts = {s: v[first : first + length].float() for s, v in held.items()}
                        if self._is_swapped(group):  # the next sub-group reuses the buffers
                            parts = {slot: part.clone() for slot, part in parts.items()}
                        yield Fragment(name, start, parts)

    def fill_masters(self, fill: FillPart) -> None:
        """Set the master weights."""
        for group, parameters in self._groups.items():
            with self._resident(group, changed=True) as flat:
                for name, parameter in parameters.items():
                    self._fill(flat.data, fill, MASTER, name, parameter)

    def show_masters(self) -> None:
        """Copy the master weights, rounded, to the weights that the model uses, as a step does."""
        zero = self._zero
        zero._partition_all_parameters()
        for number in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if whole := zero.persistent_parameters:
            whole[0].all_gather(whole)

    def fill_moments(self, fill: FillPart, slots: Sequence[str]) -> None:
        """Set the optimizer's slots; its states must be there."""
        for group, parameters in self._groups.items():
            with self._resident(group, changed=True) as flat:
                for slot, moment in self._moments(flat, slots).items():
                    for name, parameter in parameters.items():
                        self._fill(moment, fill, slot, name, parameter)

    @contextlib.contextmanager
    def _resident(self, group: int, *, changed: bool = False) -> Iterator[torch.Tensor]:
        """Yield a sub-group's flat tensor, swapped in with its moments; swap it out if changed."""
        swapped = self._is_swapped(group)
        if swapped:
            self._zero._optimizer_states_and_gradient_swap_in(group)
        yield self._zero.fp32_partitioned_groups_flat[group]
        if swapped and changed:
            self._zero._optimizer_states_and_gradient_swap_out(group)
        elif swapped:
            self._zero._release_swap_buffers(group)

    def _is_swapped(self, group: int) -> bool:
        return bool(self._zero._swappable_optimizer_subgroup(group))

    def _moments(self, flat: torch.Tensor, slots: Sequence[str]) -> dict[str, torch.Tensor]:
        return {slot: self._zero.optimizer.state[flat][slot] for slot in slots}

    def _offset(self, parameter: torch.nn.Parameter) -> int:
        """Return where a parameter's part begins in its sub-group's flat tensor."""
        return int(self._zero.grad_position[self._zero.get_param_id(parameter)][1])

    def _span(self, name: str, parameter: Any) -> tuple[int, int]:
        """Return start and length of this process's part, without the padding."""
        part = parameter.ds_tensor.ds_numel
        start = part * comm.get_rank()
        return start, max(0, min(part, self._sizes[name] - start))

    def _fill(
        self, flat: torch.Tensor, fill: FillPart, slot: str, name: str, parameter: Any
    ) -> None:
        """Read this process's part of a parameter to its place, and fill the padding with zeros."""
        start, length = self._span(name, parameter)
        place = flat.narrow(0, self._offset(parameter), parameter.ds_tensor.ds_numel)
        if length:
            fill(name, slot, start, place[:length])
        place[length:] = 0
