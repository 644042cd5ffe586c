"""Where ZeRO keeps what an optimizer knows: read and filled by parameter name.

DeepSpeed flattens the parameters of a group into partitions, one a process. Both classes find a
parameter's part of this process's partition, whatever its padding, by DeepSpeed's own addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm

from zerotrain.checkpoint import Fragment
from zerotrain.position import MASTER
from zerotrain.state import ReadTensor

CreateState = Callable[[torch.Tensor, int], dict[str, Any]]
"""From a flat tensor and its group to the optimizer's state of it."""


class GroupPartitions:
    """Stages 1 and 2: a process holds one contiguous stretch of each group's parameters.

    A parameter may lie across two processes, or wholly in another's stretch.
    """

    def __init__(self, zero: Any, trained: Mapping[str, torch.nn.Parameter]) -> None:
        self._zero = zero
        self._trained = trained

    def flats(self) -> list[list[torch.Tensor]]:
        """The flat tensors of each group, which the optimizer steps."""
        return [[flat] for flat in self._zero.single_partition_of_fp32_groups]

    def create_states(self, create: CreateState) -> None:
        """Give the optimizer a state for each flat tensor, before the first step has made one."""
        for group, flat in enumerate(self._zero.single_partition_of_fp32_groups):
            self._zero.optimizer.state[flat] = create(flat, group)

    def fragments(self, slots: Sequence[str]) -> Iterator[Fragment]:
        """This process's part of each parameter; those that lie elsewhere are left out."""
        if slots:
            self._link_slots()
        for name, mapping in self._mappings():
            parts = {MASTER: mapping.get_hp_fragment()}
            parts.update((slot, mapping.get_optim_state_fragment(slot)) for slot in slots)
            yield Fragment(name, mapping.lp_fragment_address.start, parts)

    def fill_masters(self, read: ReadTensor) -> None:
        """Set the master weights."""
        for name, mapping in self._mappings():
            _copy_part(read(name, MASTER), mapping, mapping.get_hp_fragment())

    def show_masters(self) -> None:
        """Round the master weights to the weights that are computed with."""
        self._zero.update_lp_params()

    def fill_moments(self, read: ReadTensor, slots: Sequence[str]) -> None:
        """Set the optimizer's slots; its states must be there."""
        self._link_slots()
        for name, mapping in self._mappings():
            for slot in slots:
                _copy_part(read(name, slot), mapping, mapping.get_optim_state_fragment(slot))

    def _mappings(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._trained.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:  # else the parameter lies wholly in other processes' stretches
                yield name, mapping

    def _link_slots(self) -> None:
        # DeepSpeed links the slots once, at the first step, and only then; with several groups it
        # links group 0 alone.
        self._zero._hp_optimizer_states_linked = False
        self._zero._lazy_init_hp_params_optimizer_state()


class ParameterPartitions:
    """Stage 3: every parameter is cut into equal parts, one a process, the last one padded.

    The parts of a sub-group lie in one flat tensor. Under NVMe offload it is on the disk, and empty
    here but for the time in which its sub-group is swapped in.
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
        """The flat tensors of each group, which the optimizer steps."""
        found: list[list[torch.Tensor]] = [[] for _ in self._zero.optimizer.param_groups]
        for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            found[self._zero.sub_group_to_group_id[number]].append(flat)
        return found

    def create_states(self, create: CreateState) -> None:
        """Give the optimizer a state for each flat tensor, before the first step has made one."""
        for number in self._groups:
            group = self._zero.sub_group_to_group_id[number]
            with self._resident(number, changed=True) as flat:
                self._zero.optimizer.state[flat] = create(flat, group)

    def fragments(self, slots: Sequence[str]) -> Iterator[Fragment]:
        """This process's part of each parameter, without its padding."""
        for group, parameters in self._groups.items():
            with self._resident(group) as flat:
                held = {MASTER: flat.data, **self._moments(flat, slots)}
                for name, parameter in parameters.items():
                    start, length = self._span(name, parameter)
                    if length:
                        first = self._offset(parameter)
                        parts = {s: v[first : first + length] for s, v in held.items()}
                        if self._swapped(group):  # the buffers go to the next sub-group
                            parts = {slot: part.clone() for slot, part in parts.items()}
                        yield Fragment(name, start, parts)

    def fill_masters(self, read: ReadTensor) -> None:
        """Set the master weights."""
        for group, parameters in self._groups.items():
            with self._resident(group, changed=True) as flat:
                for name, parameter in parameters.items():
                    self._fill(flat.data, read(name, MASTER), name, parameter)

    def show_masters(self) -> None:
        """Round the master weights to the weights that are computed with, as a step does."""
        zero = self._zero
        zero._partition_all_parameters()
        for number in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if whole := zero.persistent_parameters:
            whole[0].all_gather(whole)

    def fill_moments(self, read: ReadTensor, slots: Sequence[str]) -> None:
        """Set the optimizer's slots; its states must be there."""
        for group, parameters in self._groups.items():
            with self._resident(group, changed=True) as flat:
                for slot, moment in self._moments(flat, slots).items():
                    for name, parameter in parameters.items():
                        self._fill(moment, read(name, slot), name, parameter)

    @contextlib.contextmanager
    def _resident(self, group: int, *, changed: bool = False) -> Iterator[torch.Tensor]:
        """A sub-group's flat tensor, swapped in, with its moments; and out again if changed."""
        swapped = self._swapped(group)
        if swapped:
            self._zero._optimizer_states_and_gradient_swap_in(group)
        yield self._zero.fp32_partitioned_groups_flat[group]
        if swapped and changed:
            self._zero._optimizer_states_and_gradient_swap_out(group)
        elif swapped:
            self._zero._release_swap_buffers(group)

    def _swapped(self, group: int) -> bool:
        return bool(self._zero._swappable_optimizer_subgroup(group))

    def _moments(self, flat: torch.Tensor, slots: Sequence[str]) -> dict[str, torch.Tensor]:
        return {slot: self._zero.optimizer.state[flat][slot] for slot in slots}

    def _offset(self, parameter: torch.nn.Parameter) -> int:
        """Where a parameter's part begins in its sub-group's flat tensor."""
        return int(self._zero.grad_position[self._zero.get_param_id(parameter)][1])

    def _span(self, name: str, parameter: Any) -> tuple[int, int]:
        """Start and length of this process's part; the padding is no part of it."""
        part = parameter.ds_tensor.ds_numel
        start = part * comm.get_rank()
        return start, max(0, min(part, self._sizes[name] - start))

    def _fill(self, flat: torch.Tensor, full: torch.Tensor, name: str, parameter: Any) -> None:
        """Copy this process's part of a parameter to its place, and zeros into the padding."""
        start, length = self._span(name, parameter)
        place = flat.narrow(0, self._offset(parameter), parameter.ds_tensor.ds_numel)
        place[:length] = full.flatten()[start : start + length]
        place[length:] = 0


def _copy_part(full: torch.Tensor, mapping: Any, into: torch.Tensor) -> None:
    address = mapping.lp_fragment_address
    into.data.copy_(full.flatten()[address.start : address.start + address.numel])
