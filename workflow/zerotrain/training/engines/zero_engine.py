"""The DeepSpeed engine: ZeRO stages 1 to 3, optimizer and parameters on device, CPU or disk.

DeepSpeed is driven directly: `accelerate launch` starts the process, but accelerate's own wrapper
replaces optimizers, steps schedules by the world size and treats CPU runs as single processes (its
traps are listed in DeepSpeed's and accelerate's issues; none is reachable from here).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import groups as process_groups

from zerotrain.artifact.documents import read_object
from zerotrain.config import optimizers
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.device import device_type
from zerotrain.models.trainable import trained_parameters
from zerotrain.state.checkpoint import Fragment
from zerotrain.state.state import FillPart, parts_of
from zerotrain.training.engines.engine import STEADY, LossScale, clamp_state, describe_phase
from zerotrain.training.engines.zero_corrections import (
    clip_each_value,
    import_muon,
    one_copy_on_device,
    point_to,
    raise_scale_after_step,
    read_gradients_through_aligned_memory,
    remember_processor,
)
from zerotrain.training.engines.zero_partitions import GroupPartitions, ParameterPartitions
from zerotrain.training.optim.adam_bf16_states import AdamBf16States
from zerotrain.training.optim.optimizer import (
    ParamGroup,
    group_scalars,
    group_values,
    open_optimizers,
    param_groups,
    probe_scalar_state,
    scalar_state_like,
    scalars_of,
    set_hyperparameters,
)

# DeepSpeed calls collectives by deprecated names several times at every step.
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)


def init_distributed(timeout: timedelta | None = None) -> None:
    """Connect the processes, once; no wait for another process exceeds the time-out."""
    on_cpu = device_type() == "cpu"
    backend = "gloo" if on_cpu else get_accelerator().communication_backend_name()
    if not on_cpu:  # else the first exchange would be on device 0 in every process
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    waits = {} if timeout is None else {"timeout": timeout}
    deepspeed.init_distributed(dist_backend=backend, verbose=False, **waits)
    if timeout is not None:
        # ZeRO reduces over a separate group, which it would create with torch's time-out.
        process_groups._WORLD_GROUP = torch.distributed.new_group(timeout=timeout)


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
        remember_processor()
        import_muon()
        init_distributed()
        self._phase = phase
        trained = trained_parameters(model)
        # A partitioned parameter is empty; ds_shape is its full shape.
        self.shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in trained.items()}
        self.groups = param_groups(phase.train, self.shapes)
        self._updates = 0
        # DeepSpeed steps plain Adam itself: it can swap Adam's state to a disk, too.
        direct = optimizers.is_plain_adam(phase.train.optimizer, phase.train.optimizer_args)
        parameters = [[trained[name] for name in group.names] for group in self.groups]
        optimizer = self._open(parameters) if direct else _Groups(parameters)
        settings = read_object(config)
        if swap is not None:
            point_to(settings, swap)
        # DeepSpeed rounds the weights to 16 bits before it copies them to its fp32 masters.
        masters = _copies(trained) if exact and phase.launch.mixed_precision != "no" else {}
        on_host = phase.derived.offload_optimizer != "none" and phase.derived.zero_stage < 3
        alone = deepspeed.comm.get_world_size() == 1
        with one_copy_on_device(alone=alone) if on_host else contextlib.nullcontext():
            self._engine, self._zero, _, _ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=settings
            )
        read_gradients_through_aligned_memory(self._zero)
        self._raise_scale = raise_scale_after_step(self._zero)
        if phase.train.grad_clip_method == "value" and phase.train.max_grad_norm:
            clip_each_value(self._zero, phase.train.max_grad_norm, phase.derived.zero_stage)
        self._partitions = (
            ParameterPartitions(self._zero, trained, self.shapes)
            if phase.derived.zero_stage == 3
            else GroupPartitions(self._zero, trained)
        )
        if self._engine.device.type == "cuda":
            # torch keeps the memory of the unflattened weights and of their page-locked copies,
            # which no step needs: SDXL's took 9 GiB of the device until the end of the training.
            torch.cuda.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):  # since torch 2.12
                torch.accelerator.empty_host_cache()
        if masters:
            self._partitions.fill_masters(parts_of(lambda name, slot: masters[name]))
        if not direct:
            self._zero.optimizer = self._open(self._partitions.flats())
            if phase.derived.zero_stage == 3:  # it passes the optimizer one sub-group at a time
                for group in self._zero.optimizer.param_groups:
                    group["params"] = []
        if phase.launch.mixed_precision == "fp16":
            # At the lowest scale it would raise a bare Exception; the loop reports it instead.
            self._zero.loss_scaler.raise_error_at_min_scale = False
        self.device = torch.device(self._engine.device)
        self.rank: int = deepspeed.comm.get_rank()
        self.world_size: int = deepspeed.comm.get_world_size()
        # Swapped tensors pass through buffers that the next sub-group reuses.
        swapped = "nvme" in (phase.derived.offload_optimizer, phase.derived.offload_param)
        # bf16 moments are returned as float32 copies, one parameter's at a time.
        copied = swapped or phase.launch.bf16_optimizer_states
        self.steady = self.device.type in STEADY and not copied
        self.model: torch.nn.Module = self._engine

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed divides by the accumulation steps itself, and counts micro batches in its step.
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def step(self, learning_rate: float, beta1: float | None = None) -> float:
        base = self._zero.optimizer
        set_hyperparameters(base.param_groups, self.groups, self._phase, learning_rate, beta1)
        if isinstance(base, DeepSpeedCPUAdam):
            _forget_bias_history(base)
        self._engine.step()
        if self._zero.overflow:
            # DeepSpeed silently skips an update without a finite norm, at every stage and
            # precision; for bf16 at stages 1 and 2 because of bf16.check_grad_overflow.
            return float("inf")
        self._raise_scale()
        self._updates += 1
        return float(self._engine.get_global_grad_norm() or 0.0)

    def load_masters(self, fill: FillPart) -> None:
        self._partitions.fill_masters(fill)
        if not self._phase.swaps:
            self._partitions.show_masters()

    def load_moments(
        self, fill: FillPart, optimizer_step: int, saved: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._updates = optimizer_step
        if not optimizer_step:
            return
        numbers = group_scalars(self._phase, self.groups, saved)
        templates: dict[torch.device, dict[str, Any]] = {}

        def state(flat: torch.Tensor, group: int) -> dict[str, Any]:
            if flat.device not in templates:
                small = lambda one: self._open([[one]], self.groups[:1])  # noqa: E731
                templates[flat.device] = probe_scalar_state(small, self._all_slots(), flat.device)
            counts = scalar_state_like(templates[flat.device], optimizer_step, numbers[group])
            kept = torch.bfloat16 if self._phase.launch.bf16_optimizer_states else flat.dtype
            slots = self._all_slots()
            return counts | {slot: torch.zeros_like(flat.data, dtype=kept) for slot in slots}

        self._partitions.create_states(state)
        self._partitions.fill_moments(fill, self._all_slots())

    def _open(
        self,
        parameters: Sequence[Sequence[torch.Tensor]],
        groups: Sequence[ParamGroup] | None = None,
    ) -> torch.optim.Optimizer:
        """Return the phase's optimizer: DeepSpeed's compiled Adam if it is offloaded plain Adam."""
        phase, groups = self._phase, groups or self.groups
        offloaded = phase.derived.offload_optimizer != "none"
        if offloaded and optimizers.is_plain_adam(
            phase.train.optimizer, phase.train.optimizer_args
        ):
            values = [group_values(phase, group) for group in groups]
            made = AdamBf16States if phase.launch.bf16_optimizer_states else DeepSpeedCPUAdam
            compiled: torch.optim.Optimizer = made(
                [{**v, "params": p} for v, p in zip(values, parameters, strict=True)],
                adamw_mode=phase.train.optimizer == "adamw",
            )
            return compiled
        return open_optimizers(phase, groups, parameters)[0]

    def _all_slots(self) -> list[str]:
        return optimizers.slots(self._phase.train.optimizer, self._phase.train.optimizer_args)

    def load_loss_scale(self, state: dict[str, Any]) -> None:
        scaler = self._zero.loss_scaler
        if scaler.dynamic:
            state = clamp_state(state, self._phase.launch.fp16)
            scaler.cur_scale, scaler.cur_hysteresis = state["scale"], state["hysteresis"]
            scaler.cur_iter, scaler.last_overflow_iter = state["good_steps"], -1

    def masters(self) -> Iterator[Fragment]:
        return self._partitions.fragments([])

    def show_masters(self) -> None:
        self._partitions.show_masters()

    def fragments(self) -> Iterator[Fragment]:
        return self._partitions.fragments(self.slots())

    def slots(self) -> list[str]:
        return self._all_slots() if self._updates else []

    def scalars(self) -> list[dict[str, float]]:
        states, flats = self._zero.optimizer.state, self._partitions.flats()
        return [scalars_of(self._phase, states.get(flat[0], {})) for flat in flats]

    def optimizer_step(self) -> int:
        return self._updates

    def loss_scale(self) -> dict[str, Any] | None:
        if self._phase.launch.mixed_precision != "fp16":
            return None
        scaler = self._zero.loss_scaler
        if not scaler.dynamic:
            return LossScale(self._phase.launch.fp16).state()
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        # DeepSpeed doubles the scale at the step after a window's last, and continues to count.
        return {
            "scale": float(scaler.cur_scale),
            "good_steps": (good - 1) % scaler.scale_window + 1 if good else 0,
            "hysteresis": int(scaler.cur_hysteresis),
        }

    def describe(self) -> dict[str, Any]:
        return {
            **describe_phase(self._phase, self.world_size),
            "deepspeed": deepspeed.__version__,
        }


class _Groups(torch.optim.Optimizer):
    """Groups of parameters for DeepSpeed to partition; another optimizer steps its partitions.

    A real Adagrad would create its state for whole parameters, and DeepSpeed would replace it by an
    Adagrad with only one group.
    """

    def __init__(self, parameters: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        super().__init__([{"params": part} for part in parameters], {"lr": 0.0})


def _copies(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _forget_bias_history(optimizer: DeepSpeedCPUAdam) -> None:
    """Make the coming update's bias correction depend only on its step.

    The compiled optimizer keeps beta^step as a running float product and recomputes the power only
    if the step is not the next one. After a resume the two differ in the last bits; an update of
    one unused element at step 0 makes it recompute the power every time.
    """
    unused = torch.zeros(4, 1)
    group = optimizer.param_groups[0]
    optimizer.ds_opt_adam.adam_update(
        optimizer.opt_id, 0, group["lr"], *group["betas"], group["eps"], group["weight_decay"],
        group["bias_correction"], *unused,
    )  # fmt: skip
