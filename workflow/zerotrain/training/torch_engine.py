"""Plain PyTorch: fused AdamW on float32 weights, autocast for bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from zerotrain.checkpoint import Fragment
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state import ADAM_SLOTS, MASTER, ReadTensor
from zerotrain.training.engine import adam_arguments, describe_phase


class TorchEngine:
    """The model on its device through accelerate, stepped by torch's own optimizer.

    accelerate's optimizer wrapper is left out: it costs time at every step and adds nothing here.
    """

    def __init__(self, model: torch.nn.Module, phase: ResolvedPhase) -> None:
        accelerator = Accelerator(mixed_precision=phase.mixed_precision)
        self.model: torch.nn.Module = accelerator.prepare_model(model)
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self._phase = phase
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._trained.values()), fused=True, **adam_arguments(phase)
        )

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._phase.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        limit = self._phase.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), limit)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def load_optimizer(self, read: ReadTensor, optimizer_step: int) -> None:
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(read(name, MASTER))
                slots = {s: read(name, s).to(self.device, copy=True) for s in ADAM_SLOTS}
                count = torch.tensor(float(optimizer_step), device=self.device)
                self._optimizer.state[parameter] = {"step": count, **slots}

    def named_trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._trained.items()

    def fragments(self) -> Iterator[Fragment]:
        for name, parameter in self._trained.items():
            state = self._optimizer.state[parameter]
            slots = {MASTER: parameter, **{slot: state[slot] for slot in ADAM_SLOTS}}
            yield Fragment(name, 0, {slot: t.detach().flatten() for slot, t in slots.items()})

    def optimizer_step(self) -> int:
        return int(next(iter(self._optimizer.state.values()))["step"])

    def describe(self) -> dict[str, Any]:
        return describe_phase(self._phase, self.world_size)
