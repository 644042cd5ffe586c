"""Plain PyTorch: fused AdamW on float32 weights; DDP over processes; autocast for bf16 and fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from zerotrain.checkpoint import Fragment
from zerotrain.launch.files import INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.device import device_type
from zerotrain.position import ADAM_SLOTS, MASTER
from zerotrain.state import ReadTensor
from zerotrain.trained import trained_parameters
from zerotrain.training.engine import adam_groups, describe_phase
from zerotrain.training.param_groups import param_groups

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FlatGroup:
    """The parameters of a group as views of one flat tensor, and their gradients of another.

    ZeRO steps such tensors, too. The fused AdamW treats the last elements of a tensor otherwise
    than the rest, so that only equal tensors are stepped to equal bits.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
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

    @property
    def names(self) -> list[str]:
        """The parameters, in their order."""
        return list(self._spans)

    def part(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's part of a flat tensor of this group."""
        start, length = self._spans[name]
        return whole[start : start + length]

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradient of each parameter, flat."""
        assert self.weights.grad is not None
        return (self.part(self.weights.grad, name) for name in self._spans)


class TorchEngine:
    """The model on its device through accelerate, stepped by torch's own optimizer.

    accelerate's optimizer wrapper is left out: it costs time at every step and adds nothing here.
    Its mixed precision is, too: it refuses fp16 on a CPU.
    """

    def __init__(self, model: torch.nn.Module, phase: ResolvedPhase) -> None:
        # Without a GPU it must be told so, or it takes several processes for single ones.
        accelerator = Accelerator(cpu=device_type() == "cpu", mixed_precision="no")
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
        self.groups = param_groups(phase, list(trained))
        self._flats = [FlatGroup({n: trained[n] for n in g.names}) for g in self.groups]
        self.model = model
        if self.world_size > 1:
            # Placed by accelerate, the parameters would leave the flat tensors.
            self.model = accelerator.prepare_model(model, device_placement=False)
        arguments = adam_groups(phase, self.groups)
        for values, flat in zip(arguments, self._flats, strict=True):
            values["params"] = [flat.weights]
        self._optimizer = torch.optim.AdamW(arguments, fused=True)
        self._scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=INITIAL_LOSS_SCALE,
            growth_interval=LOSS_SCALE_WINDOW,
            enabled=phase.mixed_precision == "fp16",
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        share = loss / self._phase.gradient_accumulation_steps
        self._scaler.scale(share).backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        self._scaler.unscale_(self._optimizer)
        norm = self._clip()
        for group, own in zip(self._optimizer.param_groups, self.groups, strict=True):
            group["lr"] = own.rate(learning_rate, self._phase)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=False)
        return norm

    def _clip(self) -> float:
        """Clip as DeepSpeed's stages 1 and 2 do, in their order and precision, so that one process
        gives the same bits under either; the norm before clipping."""
        norms = []
        for flat in self._flats:
            # MPS has no float64.
            precise = torch.float32 if self.device.type == "mps" else torch.float64
            each = [torch.linalg.vector_norm(g, dtype=precise) for g in flat.gradients()]
            norms.append(torch.stack(each).square().sum().float().sqrt())
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._phase.max_grad_norm:
            excess = torch.clamp((norm + 1e-6) / self._phase.max_grad_norm, min=1.0)
            for flat in self._flats:
                assert flat.weights.grad is not None
                flat.weights.grad.mul_(1.0 / excess)
        return float(norm)

    def load_masters(self, read: ReadTensor) -> None:
        for flat in self._flats:
            for name in flat.names:
                flat.part(flat.weights.data, name).copy_(read(name, MASTER).flatten())

    def load_moments(self, read: ReadTensor, optimizer_step: int) -> None:
        for flat in self._flats:
            slots = {slot: torch.zeros_like(flat.weights.data) for slot in ADAM_SLOTS}
            for name in flat.names:
                for slot in ADAM_SLOTS:
                    flat.part(slots[slot], name).copy_(read(name, slot).flatten())
            count = torch.tensor(float(optimizer_step), device=self.device)
            self._optimizer.state[flat.weights] = {"step": count, **slots}

    def load_loss_scale(self, found: dict[str, Any]) -> None:
        now = self._scaler.state_dict()
        due = min(found["good_steps"], LOSS_SCALE_WINDOW - 1)  # at the latest at the next step
        taken = {"scale": found["scale"], "_growth_tracker": due}
        self._scaler.load_state_dict({**now, **taken})

    def fragments(self) -> Iterator[Fragment]:
        for flat in self._flats:
            state = self._optimizer.state[flat.weights]
            slots = {MASTER: flat.weights.data, **{slot: state[slot] for slot in ADAM_SLOTS}}
            # Every process holds all; each writes its share.
            for name in flat.names[self.rank :: self.world_size]:
                yield Fragment(name, 0, {s: flat.part(whole, name) for s, whole in slots.items()})

    def optimizer_step(self) -> int:
        return int(next(iter(self._optimizer.state.values()))["step"])

    def loss_scale(self) -> dict[str, Any] | None:
        if not self._scaler.is_enabled():
            return None
        found = self._scaler.state_dict()
        return {"scale": float(found["scale"]), "good_steps": int(found["_growth_tracker"])}

    def describe(self) -> dict[str, Any]:
        return describe_phase(self._phase, self.world_size)
