"""DeepSpeed ZeRO stages 1 and 2, the optimizer on the device or on the CPU.

DeepSpeed is driven directly: `accelerate launch` starts the process, but accelerate's own wrapper
swaps optimizers, steps schedules by the world size and believes CPU runs to be single (its traps
are listed in DeepSpeed's and accelerate's issues; none is reachable from here).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

from zerotrain.checkpoint import Fragment
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.state import ADAM_SLOTS, MASTER, ReadTensor
from zerotrain.training.engine import adam_arguments, describe_phase


class ZeroEngine:
    """A DeepSpeed engine over the model."""

    def __init__(self, model: torch.nn.Module, phase: ResolvedPhase, config: Path) -> None:
        on_gpu = torch.cuda.is_available()
        deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
        self._phase = phase
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        trained = list(self._trained.values())
        optimizer: torch.optim.Optimizer
        if phase.offload_optimizer == "cpu":
            optimizer = DeepSpeedCPUAdam(trained, adamw_mode=True, **adam_arguments(phase))
        else:
            optimizer = torch.optim.AdamW(trained, fused=True, **adam_arguments(phase))
        # DeepSpeed rounds the weights to bf16 before it makes its fp32 masters of them.
        exact = {} if phase.mixed_precision == "no" else _copies(self._trained)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=json.loads(config.read_text())
        )
        for name, weights in exact.items():
            safe_set_full_fp32_param(self._trained[name], weights)
        self.device = torch.device(self._engine.device)
        self.rank: int = deepspeed.comm.get_rank()
        self.world_size: int = deepspeed.comm.get_world_size()
        self.model: torch.nn.Module = self._engine

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed divides by the accumulation itself, and counts micro batches in its step.
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def step(self, learning_rate: float) -> float:
        base = self._zero.optimizer
        for group in base.param_groups:
            group["lr"] = learning_rate
        if isinstance(base, DeepSpeedCPUAdam):
            _forget_bias_history(base)
        self._engine.step()
        if self._zero.overflow:
            return float("inf")  # DeepSpeed leaves such an update out without a word
        return float(self._engine.get_global_grad_norm() or 0.0)

    def load_optimizer(self, read: ReadTensor, optimizer_step: int) -> None:
        base = self._zero.optimizer
        for flat in self._zero.single_partition_of_fp32_groups:
            count: Any = optimizer_step
            if not isinstance(base, DeepSpeedCPUAdam):
                # torch wants a tensor, and one of its own for each state: it counts in place.
                count = torch.tensor(float(optimizer_step), device=flat.device)
            slots = {slot: torch.zeros_like(flat) for slot in ADAM_SLOTS}
            base.state[flat] = {"step": count, **slots}
        self._link_slots()
        for name, parameter in self._trained.items():
            safe_set_full_fp32_param(parameter, read(name, MASTER))
            for slot in ADAM_SLOTS:
                safe_set_full_optimizer_state(parameter, read(name, slot), slot)

    def named_trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._trained.items()

    def fragments(self) -> Iterator[Fragment]:
        self._link_slots()
        for name, parameter in self._trained.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue  # the parameter lies wholly in other ranks' partitions
            slots = {MASTER: mapping.get_hp_fragment()}
            slots.update((slot, mapping.get_optim_state_fragment(slot)) for slot in ADAM_SLOTS)
            yield Fragment(name, mapping.lp_fragment_address.start, slots)

    def optimizer_step(self) -> int:
        return int(next(iter(self._zero.optimizer.state.values()))["step"])

    def describe(self) -> dict[str, Any]:
        return {
            **describe_phase(self._phase, self.world_size),
            "deepspeed": deepspeed.__version__,
        }

    def _link_slots(self) -> None:
        # DeepSpeed links the slots once, at the first step, and only then; with several groups it
        # links group 0 alone. Linking again is what safe_get_* and safe_set_* need.
        self._zero._hp_optimizer_states_linked = False
        self._zero._lazy_init_hp_params_optimizer_state()


def _copies(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _forget_bias_history(optimizer: DeepSpeedCPUAdam) -> None:
    """Make the coming update's bias correction a function of its step alone.

    The compiled optimizer keeps beta^step as a running float product and takes the power anew only
    where the step is not the next one. After a resume the two differ in the last bits; an update of
    one element that nobody uses, at step 0, makes it take the power every time.
    """
    unused = torch.zeros(4, 1)
    group = optimizer.param_groups[0]
    optimizer.ds_opt_adam.adam_update(
        optimizer.opt_id, 0, group["lr"], *group["betas"], group["eps"], group["weight_decay"],
        group["bias_correction"], *unused,
    )  # fmt: skip
