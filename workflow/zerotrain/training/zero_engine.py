"""DeepSpeed ZeRO stages 1 to 3, optimizer and parameters on the device, the CPU or a disk.

DeepSpeed is driven directly: `accelerate launch` starts the process, but accelerate's own wrapper
swaps optimizers, steps schedules by the world size and believes CPU runs to be single (its traps
are listed in DeepSpeed's and accelerate's issues; none is reachable from here).
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam

from zerotrain.checkpoint import Fragment
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.position import ADAM_SLOTS
from zerotrain.state import ReadTensor
from zerotrain.trained import trained_parameters
from zerotrain.training.engine import adam_groups, describe_phase
from zerotrain.training.param_groups import param_groups
from zerotrain.training.zero_partitions import GroupPartitions, ParameterPartitions
from zerotrain.training.zero_swap import point_to, read_gradients_through_aligned_memory

# torch has new names for collectives that DeepSpeed calls several times at every step.
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)


def init_distributed() -> None:
    """Let the processes meet, once."""
    on_gpu = torch.cuda.is_available()
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)


class ZeroEngine:
    """A DeepSpeed engine over the model."""

    def __init__(
        self,
        model: torch.nn.Module,
        phase: ResolvedPhase,
        config: Path,
        *,
        exact: bool,
        swap: Path | None = None,
    ) -> None:
        init_distributed()
        _refuse_fp16_where_unsupported(phase)
        self._phase = phase
        trained = trained_parameters(model)
        # A parameter that is partitioned already is empty, and remembers its shape.
        self.shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in trained.items()}
        self.groups = param_groups(phase, list(trained))
        groups = adam_groups(phase, self.groups)
        for values, group in zip(groups, self.groups, strict=True):
            values["params"] = [trained[name] for name in group.names]
        optimizer: torch.optim.Optimizer
        if phase.offload_optimizer == "none":
            optimizer = torch.optim.AdamW(groups, fused=True)
        else:
            optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True)
        settings = json.loads(config.read_text())
        if swap is not None:
            point_to(settings, swap)
        # DeepSpeed rounds the weights to 16 bits before it makes its fp32 masters of them.
        masters = _copies(trained) if exact and phase.mixed_precision != "no" else {}
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings
        )
        read_gradients_through_aligned_memory(self._zero)
        self._partitions = (
            ParameterPartitions(self._zero, trained, self.shapes)
            if phase.zero_stage == 3
            else GroupPartitions(self._zero, trained)
        )
        if masters:
            self._partitions.fill_masters(lambda name, slot: masters[name])
        if phase.mixed_precision == "fp16":
            # At the lowest scale it raises a bare Exception; the loop has a sentence for it.
            self._zero.loss_scaler.raise_error_at_min_scale = False
            # An update that overflows makes no states, and a checkpoint may follow it.
            self._create_states(0)
        self.device = torch.device(self._engine.device)
        self.rank: int = deepspeed.comm.get_rank()
        self.world_size: int = deepspeed.comm.get_world_size()
        self.model: torch.nn.Module = self._engine

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed divides by the accumulation itself, and counts micro batches in its step.
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def step(self, learning_rate: float) -> float:
        base = self._zero.optimizer
        for group, own in zip(base.param_groups, self.groups, strict=True):
            group["lr"] = own.rate(learning_rate, self._phase)
        if isinstance(base, DeepSpeedCPUAdam):
            _forget_bias_history(base)
        self._engine.step()
        if self._zero.overflow:
            return float("inf")  # DeepSpeed leaves such an update out without a word
        return float(self._engine.get_global_grad_norm() or 0.0)

    def load_masters(self, read: ReadTensor) -> None:
        self._partitions.fill_masters(read)

    def load_moments(self, read: ReadTensor, optimizer_step: int) -> None:
        self._create_states(optimizer_step)
        self._partitions.fill_moments(read)

    def _create_states(self, optimizer_step: int) -> None:
        def state(flat: torch.Tensor) -> dict[str, Any]:
            count: Any = optimizer_step
            if not isinstance(self._zero.optimizer, DeepSpeedCPUAdam):
                # torch wants a tensor, and one of its own for each state: it counts in place.
                count = torch.tensor(float(optimizer_step), device=flat.device)
            return {"step": count, **{slot: torch.zeros_like(flat.data) for slot in ADAM_SLOTS}}

        self._partitions.create_states(state)

    def load_loss_scale(self, found: dict[str, Any]) -> None:
        scaler = self._zero.loss_scaler
        scaler.cur_scale = found["scale"]
        scaler.cur_iter, scaler.last_overflow_iter = found["good_steps"], -1

    def fragments(self) -> Iterator[Fragment]:
        return self._partitions.fragments()

    def optimizer_step(self) -> int:
        return int(next(iter(self._zero.optimizer.state.values()))["step"])

    def loss_scale(self) -> dict[str, Any] | None:
        if self._phase.mixed_precision != "fp16":
            return None
        scaler = self._zero.loss_scaler
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        # It doubles the scale at the step after the last one of a window, and counts on.
        since = (good - 1) % scaler.scale_window + 1 if good else 0
        return {"scale": float(scaler.cur_scale), "good_steps": since}

    def describe(self) -> dict[str, Any]:
        return {
            **describe_phase(self._phase, self.world_size),
            "deepspeed": deepspeed.__version__,
        }


def _refuse_fp16_where_unsupported(phase: ResolvedPhase) -> None:
    device = get_accelerator()
    if phase.mixed_precision == "fp16" and not device.is_fp16_supported():
        raise PipelineError(
            f"phase {phase.phase}: mixed_precision fp16, but DeepSpeed does not support it on this "
            f"{device.device_name()}",
            hint="use bf16 or no; plain PyTorch (launch: torch) trains fp16 here, slowly",
        )


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
