"""The PyTorch engine: torch.optim on float32 weights, DDP, and autocast for bf16 and fp16.

DDP rebuilds its buckets after the first backward of a start, in the order in which gradients
arrived. Three or more processes add a gradient in an order that depends on its place in its bucket,
so the first step of a resumed training would differ from that of an uninterrupted one. Here its
gradient buckets are the same from the first step of every start.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from zerotrain.config import optimizers
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.device import device_type
from zerotrain.models.trainable import trained_parameters
from zerotrain.state.checkpoint import Fragment
from zerotrain.state.position import MASTER
from zerotrain.state.state import FillPart
from zerotrain.training.engines.engine import STEADY, LossScale, describe_phase
from zerotrain.training.optim.optimizer import (
    Packed,
    group_scalars,
    open_optimizers,
    param_groups,
    probe_scalar_state,
    read_slot,
    scalar_state_like,
    scalars_of,
    set_hyperparameters,
)

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FlatGroup:
    """A group's parameters as views of one flat tensor, and their gradients as views of another.

    ZeRO steps such tensors, too. A fused optimizer treats the last elements of a tensor differently
    from the rest, so only equal tensors are stepped to equal bits.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters
        first = next(iter(parameters.values()))
        sizes = [parameter.numel() for parameter in parameters.values()]
        starts = [0, *accumulate(sizes)]
        self._spans = dict(zip(parameters, zip(starts, sizes, strict=False), strict=True))
        whole = starts[-1] + starts[-1] % 2  # as DeepSpeed pads it
        self.weights = torch.nn.Parameter(torch.zeros(whole, device=first.device))
        self.weights.grad = torch.zeros_like(self.weights.data)
        for name, parameter in parameters.items():
            part = self.part(self.weights.data, name)
            part.copy_(parameter.data.flatten())
            parameter.data = part.view_as(parameter)
            parameter.grad = self.part(self.weights.grad, name).view_as(parameter)
        self.gradients = [self.part(self.weights.grad, name) for name in parameters]
        """The flat gradient of each parameter."""

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in their order."""
        return list(self._spans)

    def part(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """Return a parameter's part of a flat tensor of this group."""
        start, length = self._spans[name]
        return whole[start : start + length]

    @property
    def gradient(self) -> torch.Tensor:
        """The flat gradient of all parameters."""
        assert self.weights.grad is not None
        return self.weights.grad


class TorchEngine:
    """The model on its device through accelerate, stepped by torch's own optimizer.

    accelerate's optimizer wrapper is not used: it costs time at every step and adds nothing here.
    Neither is its mixed precision: it refuses fp16 on a CPU.
    """

    def __init__(self, model: torch.nn.Module, phase: ResolvedPhase) -> None:
        # Without `cpu`, accelerate treats several processes on a CPU as single ones.
        accelerator = Accelerator(
            cpu=device_type() == "cpu",
            mixed_precision="no",
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    find_unused_parameters=phase.launch.find_unused_parameters,
                    # DDP would broadcast the codes of quantized weights before each forward pass.
                    broadcast_buffers=phase.base_model_precision == "no_change",
                )
            ],
        )
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self._phase = phase
        if phase.launch.mixed_precision in AUTOCAST:
            cast = torch.autocast(self.device.type, AUTOCAST[phase.launch.mixed_precision])
            model.forward = cast(model.forward)
        model.to(self.device)
        trained = trained_parameters(model)
        self.shapes = {name: list(p.shape) for name, p in trained.items()}
        self.groups = param_groups(phase.train, self.shapes)
        self._flats = [FlatGroup({n: trained[n] for n in g.names}) for g in self.groups]
        self.model = model
        if self.world_size > 1:
            # If accelerate placed the parameters, they would leave the flat tensors.
            self.model = accelerator.prepare_model(model, device_placement=False)
            fix_buckets(self.model)
        self._whole = optimizers.find(phase.train.optimizer)[0].whole
        self._optimizers = open_optimizers(
            phase,
            self.groups,
            [list(f.parameters.values()) if self._whole else [f.weights] for f in self._flats],
        )
        # An optimizer with 8-bit moments returns float32 copies, one parameter's at a time.
        packed = any(isinstance(one, Packed) for one in self._optimizers)
        self.steady = self.device.type in STEADY and not packed
        self._updates = 0
        self._scale = (
            LossScale(phase.launch.fp16) if phase.launch.mixed_precision == "fp16" else None
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        share = loss / self._phase.train.gradient_accumulation_steps
        scaled = share * self._scale.scale if self._scale else share
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float, beta1: float | None = None) -> float:
        if self._scale:
            for flat in self._flats:
                flat.gradient.mul_(1.0 / self._scale.scale)
        norm = self._clip()
        overflow = not math.isfinite(norm)
        if self._scale:
            self._scale.update(overflow)
        for optimizer in self._optimizers:
            set_hyperparameters(
                optimizer.param_groups, self.groups, self._phase, learning_rate, beta1
            )
            if not overflow:
                optimizer.step()
        self._updates += not overflow
        for flat in self._flats:
            flat.gradient.zero_()
        return norm

    def _clip(self) -> float:
        """Clip as DeepSpeed's stages 1 and 2 do; return the norm before clipping.

        Order and precision are theirs, so that one process gives the same bits under either.
        """
        norms = []
        for flat in self._flats:
            # MPS has no float64.
            precise = torch.float32 if self.device.type == "mps" else torch.float64
            each = torch.stack(torch._foreach_norm(flat.gradients, 2, dtype=precise))
            norms.append(each.square().sum().float().sqrt())
        norm = torch.linalg.vector_norm(torch.stack(norms))
        bound = self._phase.train.max_grad_norm
        if bound and self._phase.train.grad_clip_method == "value":
            for flat in self._flats:
                flat.gradient.clamp_(-bound, bound)
        elif bound:
            excess = torch.clamp((norm + 1e-6) / bound, min=1.0)
            for flat in self._flats if excess != 1.0 else ():  # 1 would change no bit
                flat.gradient.mul_(1.0 / excess)
        return float(norm)

    def load_masters(self, fill: FillPart) -> None:
        for flat in self._flats:
            for name in flat.names:
                fill(name, MASTER, 0, flat.part(flat.weights.data, name))

    def load_moments(
        self, fill: FillPart, optimizer_step: int, saved: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._updates = optimizer_step
        numbers = group_scalars(self._phase, self.groups, saved)
        for optimizer in self._optimizers if optimizer_step else ():
            for group, own in enumerate(optimizer.param_groups):
                for stepped in own["params"]:
                    if isinstance(optimizer, Packed):
                        slots = self._read_slots(fill, group, stepped)
                        optimizer.fill(stepped, optimizer_step, slots)
                        continue
                    template = self._counters(group, stepped)
                    state = scalar_state_like(template, optimizer_step, numbers[group])
                    optimizer.state[stepped] = state | self._read_slots(fill, group, stepped)

    def _counters(self, group: int, stepped: torch.nn.Parameter) -> dict[str, Any]:
        """Return what an optimizer keeps of a stepped tensor in addition to its slots."""

        def open_small(small: torch.nn.Parameter) -> torch.optim.Optimizer:
            made = open_optimizers(self._phase, [self.groups[group]], [[small]])
            return next(one for one in made if one.param_groups[0]["params"])

        # Muon checks the number of dimensions.
        return probe_scalar_state(open_small, self._all_slots(), self.device, (2,) * stepped.ndim)

    def _read_slots(
        self, fill: FillPart, group: int, stepped: torch.nn.Parameter
    ) -> dict[str, torch.Tensor]:
        flat = self._flats[group]
        if self._whole:
            name = next(name for name, own in flat.parameters.items() if own is stepped)
            values = {}
            for slot in self._slots_of(name, self._all_slots()):
                shape = optimizers.slot_shape(self._phase.train.optimizer, slot, self.shapes[name])
                assert shape is not None
                values[slot] = torch.empty(shape, device=self.device)
                fill(name, slot, 0, values[slot].view(-1))
            return values
        slots = {slot: torch.zeros_like(flat.weights.data) for slot in self._all_slots()}
        for name in flat.names:
            for slot, whole in slots.items():
                fill(name, slot, 0, flat.part(whole, name))
        return slots

    def _all_slots(self) -> list[str]:
        return optimizers.slots(self._phase.train.optimizer, self._phase.train.optimizer_args)

    def _slots_of(self, name: str, slots: list[str]) -> list[str]:
        """Return the slots that a parameter has: Muon and Adafactor decide by its shape."""
        shape, optimizer = self.shapes[name], self._phase.train.optimizer
        return [slot for slot in slots if optimizers.slot_shape(optimizer, slot, shape) is not None]

    def load_loss_scale(self, state: dict[str, Any]) -> None:
        if self._scale:
            self._scale.load(state)

    def masters(self) -> Iterator[Fragment]:
        for flat, name in self._own_share():
            yield Fragment(name, 0, {MASTER: flat.part(flat.weights.data, name)})

    def show_masters(self) -> None:
        if self.world_size > 1:  # in a single process they are the weights
            for flat in self._flats:
                for number, name in enumerate(flat.names):
                    owner = number % self.world_size
                    distributed.broadcast(flat.part(flat.weights.data, name), src=owner)

    def fragments(self) -> Iterator[Fragment]:
        for flat, name in self._own_share():
            slots = {MASTER: flat.part(flat.weights.data, name)}
            for slot in self._slots_of(name, self.slots()):
                slots[slot] = self._slot(flat, name, slot)
            yield Fragment(name, 0, slots)

    def _own_share(self) -> Iterator[tuple[FlatGroup, str]]:
        """Yield this rank's share of the parameters, which every process holds in full."""
        for flat in self._flats:
            for name in flat.names[self.rank :: self.world_size]:
                yield flat, name

    def _slot(self, flat: FlatGroup, name: str, slot: str) -> torch.Tensor:
        stepped = flat.parameters[name] if self._whole else flat.weights
        owner = next(o for o in self._optimizers if stepped in o.state)
        values = read_slot(owner, stepped, slot)
        return values if self._whole else flat.part(values, name)

    def slots(self) -> list[str]:
        return self._all_slots() if self._updates else []

    def scalars(self) -> list[dict[str, float]]:
        states = self._optimizers[0].state
        stepped = [f.parameters.values() if self._whole else (f.weights,) for f in self._flats]
        first = [next((one for one in group if one in states), None) for group in stepped]
        return [scalars_of(self._phase, states[one] if one is not None else {}) for one in first]

    def optimizer_step(self) -> int:
        return self._updates

    def loss_scale(self) -> dict[str, Any] | None:
        return self._scale.state() if self._scale else None

    def describe(self) -> dict[str, Any]:
        return describe_phase(self._phase, self.world_size)


FROM_THE_END = "DDP_SET_LAST_BUCKET_CAP"


def fix_buckets(model: Any) -> None:
    """Give a DistributedDataParallel its final buckets before its first forward pass.

    They are the buckets of find_unused_parameters: the parameters in their order, the last bucket
    first, so that it is sent while backward computes the others.
    """
    if model.find_unused_parameters:
        return
    # With this set, torch cuts the reversed order from its end, just as it cuts the plain order.
    os.environ[FROM_THE_END] = "1"
    model.reducer._remove_autograd_hooks()
    parameters, sparse = model._build_params_for_reducer()
    parameters, sparse = parameters[::-1], sparse[::-1]
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    model.reducer._push_all_rebuilt_params()


def look_for_unused(model: Any) -> None:
    """Make a DistributedDataParallel find unused parameters, as if it was built that way.

    The result of its last backward pass is discarded: gradients are set to zero, and no process
    waits for another.
    """
    os.environ.pop(FROM_THE_END, None)
    model.reducer._remove_autograd_hooks()
    model.find_unused_parameters = True
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()
