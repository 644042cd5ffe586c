"""Plain PyTorch: torch.optim on float32 weights; DDP over processes; autocast for bf16 and fp16."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from zerotrain import optimizers
from zerotrain.checkpoint import Fragment
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.device import device_type
from zerotrain.position import MASTER
from zerotrain.state import ReadTensor
from zerotrain.trained import trained_parameters
from zerotrain.training.ddp_buckets import fix_buckets
from zerotrain.training.engine import STEADY, describe_phase
from zerotrain.training.loss_scale import LossScale
from zerotrain.training.optimizer import (
    Packed,
    counters,
    drive,
    filled,
    group_scalars,
    open_optimizers,
    read_slot,
    scalars_of,
)
from zerotrain.training.param_groups import param_groups

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FlatGroup:
    """The parameters of a group as views of one flat tensor, and their gradients of another.

    ZeRO steps such tensors, too. A fused optimizer treats the last elements of a tensor otherwise
    than the rest, so that only equal tensors are stepped to equal bits.
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
        """The gradient of each parameter, flat."""

    @property
    def names(self) -> list[str]:
        """The parameters, in their order."""
        return list(self._spans)

    def part(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's part of a flat tensor of this group."""
        start, length = self._spans[name]
        return whole[start : start + length]

    @property
    def gradient(self) -> torch.Tensor:
        """The flat gradient of all."""
        assert self.weights.grad is not None
        return self.weights.grad


class TorchEngine:
    """The model on its device through accelerate, stepped by torch's own optimizer.

    accelerate's optimizer wrapper is left out: it costs time at every step and adds nothing here.
    Its mixed precision is, too: it refuses fp16 on a CPU.
    """

    def __init__(self, model: torch.nn.Module, phase: ResolvedPhase) -> None:
        # Without a GPU it must be told so, or it takes several processes for single ones.
        accelerator = Accelerator(
            cpu=device_type() == "cpu",
            mixed_precision="no",
            kwargs_handlers=[
                DistributedDataParallelKwargs(find_unused_parameters=phase.find_unused_parameters)
            ],
        )
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self._phase = phase
        if phase.mixed_precision in AUTOCAST:
            cast = torch.autocast(self.device.type, AUTOCAST[phase.mixed_precision])
            model.forward = cast(model.forward)
        model.to(self.device)
        trained = trained_parameters(model)
        self.shapes = {name: list(p.shape) for name, p in trained.items()}
        self.groups = param_groups(phase, self.shapes)
        self._flats = [FlatGroup({n: trained[n] for n in g.names}) for g in self.groups]
        self.model = model
        if self.world_size > 1:
            # Placed by accelerate, the parameters would leave the flat tensors.
            self.model = accelerator.prepare_model(model, device_placement=False)
            fix_buckets(self.model)
        self._whole = optimizers.find(phase.optimizer)[0].whole
        self._optimizers = open_optimizers(
            phase,
            self.groups,
            [list(f.parameters.values()) if self._whole else [f.weights] for f in self._flats],
        )
        # What keeps its moments in 8 bits gives copies in float32: one parameter's at a time.
        packed = any(isinstance(one, Packed) for one in self._optimizers)
        self.steady = self.device.type in STEADY and not packed
        self._updates = 0
        self._scale = LossScale(phase.fp16) if phase.mixed_precision == "fp16" else None

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        share = loss / self._phase.gradient_accumulation_steps
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
            drive(optimizer.param_groups, self.groups, self._phase, learning_rate, beta1)
            if not overflow:
                optimizer.step()
        self._updates += not overflow
        for flat in self._flats:
            flat.gradient.zero_()
        return norm

    def _clip(self) -> float:
        """Clip as DeepSpeed's stages 1 and 2 do, in their order and precision, so that one process
        gives the same bits under either; the norm before clipping."""
        norms = []
        for flat in self._flats:
            # MPS has no float64.
            precise = torch.float32 if self.device.type == "mps" else torch.float64
            each = torch.stack(torch._foreach_norm(flat.gradients, 2, dtype=precise))
            norms.append(each.square().sum().float().sqrt())
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._phase.max_grad_norm:
            excess = torch.clamp((norm + 1e-6) / self._phase.max_grad_norm, min=1.0)
            for flat in self._flats if excess != 1.0 else ():  # 1 would change no bit
                flat.gradient.mul_(1.0 / excess)
        return float(norm)

    def load_masters(self, read: ReadTensor) -> None:
        for flat in self._flats:
            for name in flat.names:
                flat.part(flat.weights.data, name).copy_(read(name, MASTER).flatten())

    def load_moments(
        self, read: ReadTensor, optimizer_step: int, saved: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._updates = optimizer_step
        numbers = group_scalars(self._phase, self.groups, saved)
        for optimizer in self._optimizers if optimizer_step else ():
            for group, own in enumerate(optimizer.param_groups):
                for stepped in own["params"]:
                    if isinstance(optimizer, Packed):
                        slots = self._read_slots(read, group, stepped)
                        optimizer.fill(stepped, optimizer_step, slots)
                        continue
                    template = self._counters(group, stepped)
                    state = filled(template, optimizer_step, numbers[group])
                    optimizer.state[stepped] = state | self._read_slots(read, group, stepped)

    def _counters(self, group: int, stepped: torch.nn.Parameter) -> dict[str, Any]:
        """What an optimizer keeps beside its slots of what it steps."""

        def open_small(small: torch.nn.Parameter) -> torch.optim.Optimizer:
            made = open_optimizers(self._phase, [self.groups[group]], [[small]])
            return next(one for one in made if one.param_groups[0]["params"])

        # Muon asks for the dimensions.
        return counters(open_small, self._all_slots(), self.device, (2,) * stepped.ndim)

    def _read_slots(
        self, read: ReadTensor, group: int, stepped: torch.nn.Parameter
    ) -> dict[str, torch.Tensor]:
        flat = self._flats[group]
        if self._whole:
            name = next(name for name, own in flat.parameters.items() if own is stepped)
            return {
                slot: read(name, slot).to(self.device, copy=True)
                for slot in self._slots_of(name, self._all_slots())
            }
        slots = {slot: torch.zeros_like(flat.weights.data) for slot in self._all_slots()}
        for name in flat.names:
            for slot, whole in slots.items():
                flat.part(whole, name).copy_(read(name, slot).flatten())
        return slots

    def _all_slots(self) -> list[str]:
        return optimizers.slots(self._phase.optimizer, self._phase.optimizer_args)

    def _slots_of(self, name: str, slots: list[str]) -> list[str]:
        """Those of the slots that a parameter has: Muon and Adafactor look at its shape."""
        shape, optimizer = self.shapes[name], self._phase.optimizer
        return [slot for slot in slots if optimizers.slot_shape(optimizer, slot, shape) is not None]

    def load_loss_scale(self, found: dict[str, Any]) -> None:
        if self._scale:
            self._scale.load(found)

    def masters(self) -> Iterator[Fragment]:
        for flat, name in self._own_share():
            yield Fragment(name, 0, {MASTER: flat.part(flat.weights.data, name)})

    def show_masters(self) -> None:
        if self.world_size > 1:  # alone, they are the weights
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
        """Every process holds all; each answers for its share."""
        for flat in self._flats:
            for name in flat.names[self.rank :: self.world_size]:
                yield flat, name

    def _slot(self, flat: FlatGroup, name: str, slot: str) -> torch.Tensor:
        stepped = flat.parameters[name] if self._whole else flat.weights
        owner = next(o for o in self._optimizers if stepped in o.state)
        found = read_slot(owner, stepped, slot)
        return found if self._whole else flat.part(found, name)

    def slots(self) -> list[str]:
        return self._all_slots() if self._updates else []

    def scalars(self) -> list[dict[str, float]]:
        states = self._optimizers[0].state
        return [scalars_of(self._phase, states.get(flat.weights, {})) for flat in self._flats]

    def optimizer_step(self) -> int:
        return self._updates

    def loss_scale(self) -> dict[str, Any] | None:
        return self._scale.state() if self._scale else None

    def describe(self) -> dict[str, Any]:
        return describe_phase(self._phase, self.world_size)
