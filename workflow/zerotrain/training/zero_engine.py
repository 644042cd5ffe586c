"""DeepSpeed ZeRO stages 1 to 3, optimizer and parameters on the device, the CPU or a disk.

DeepSpeed is driven directly: `accelerate launch` starts the process, but accelerate's own wrapper
swaps optimizers, steps schedules by the world size and believes CPU runs to be single (its traps
are listed in DeepSpeed's and accelerate's issues; none is reachable from here).
"""

from __future__ import annotations

import contextlib
import json
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

from zerotrain import optimizers
from zerotrain.checkpoint import Fragment
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.device import device_type
from zerotrain.state import ReadTensor
from zerotrain.trained import trained_parameters
from zerotrain.training.deepspeed_start import import_muon, remember_processor
from zerotrain.training.engine import STEADY, describe_phase
from zerotrain.training.loss_scale import LossScale, fitted
from zerotrain.training.optimizer import (
    counters,
    drive,
    filled,
    group_scalars,
    group_values,
    open_optimizers,
    scalars_of,
)
from zerotrain.training.param_groups import ParamGroup, param_groups
from zerotrain.training.zero_partitions import GroupPartitions, ParameterPartitions
from zerotrain.training.zero_swap import point_to, read_gradients_through_aligned_memory

# torch has new names for collectives that DeepSpeed calls several times at every step.
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)


def init_distributed(timeout: timedelta | None = None) -> None:
    """Let the processes meet, once; no wait for another lasts longer than the time-out."""
    on_cpu = device_type() == "cpu"
    backend = "gloo" if on_cpu else get_accelerator().communication_backend_name()
    if not on_cpu:  # before the first exchange, which would be on device 0 in every process
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    waits = {} if timeout is None else {"timeout": timeout}
    deepspeed.init_distributed(dist_backend=backend, verbose=False, **waits)
    if timeout is not None:
        # ZeRO reduces over a group of its own, which it would make with torch's time-out.
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
        # A parameter that is partitioned already is empty, and remembers its shape.
        self.shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in trained.items()}
        self.groups = param_groups(phase, self.shapes)
        self._updates = 0
        # Plain Adam is DeepSpeed's to step: it swaps that one's state to a disk, too.
        direct = optimizers.plain_adam(phase.optimizer, phase.optimizer_args)
        parameters = [[trained[name] for name in group.names] for group in self.groups]
        optimizer = self._open(parameters) if direct else _Groups(parameters)
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
        if not direct:
            self._zero.optimizer = self._open(self._partitions.flats())
            if phase.zero_stage == 3:  # it gives the optimizer one sub-group after another
                for group in self._zero.optimizer.param_groups:
                    group["params"] = []
        if phase.mixed_precision == "fp16":
            # At the lowest scale it raises a bare Exception; the loop has a sentence for it.
            self._zero.loss_scaler.raise_error_at_min_scale = False
        self.device = torch.device(self._engine.device)
        self.rank: int = deepspeed.comm.get_rank()
        self.world_size: int = deepspeed.comm.get_world_size()
        # What is swapped to a disk passes through buffers that the next sub-group takes.
        swapped = "nvme" in (phase.offload_optimizer, phase.offload_param)
        self.steady = self.device.type in STEADY and not swapped
        self.model: torch.nn.Module = self._engine

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed divides by the accumulation itself, and counts micro batches in its step.
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def step(self, learning_rate: float, beta1: float | None = None) -> float:
        base = self._zero.optimizer
        drive(base.param_groups, self.groups, self._phase, learning_rate, beta1)
        if isinstance(base, DeepSpeedCPUAdam):
            _forget_bias_history(base)
        self._engine.step()
        if self._zero.overflow:
            # DeepSpeed leaves an update without a finite norm out, and says no word, at every
            # stage and precision; for bf16 at stages 1 and 2 because of bf16.check_grad_overflow.
            return float("inf")
        self._updates += 1
        return float(self._engine.get_global_grad_norm() or 0.0)

    def load_masters(self, read: ReadTensor) -> None:
        self._partitions.fill_masters(read)

    def load_moments(
        self, read: ReadTensor, optimizer_step: int, saved: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._updates = optimizer_step
        if not optimizer_step:
            return
        numbers = group_scalars(self._phase, self.groups, saved)
        templates: dict[torch.device, dict[str, Any]] = {}

        def state(flat: torch.Tensor, group: int) -> dict[str, Any]:
            if flat.device not in templates:
                small = lambda one: self._open([[one]], self.groups[:1])  # noqa: E731
                templates[flat.device] = counters(small, self._all_slots(), flat.device)
            counts = filled(templates[flat.device], optimizer_step, numbers[group])
            return counts | {slot: torch.zeros_like(flat.data) for slot in self._all_slots()}

        self._partitions.create_states(state)
        self._partitions.fill_moments(read, self._all_slots())

    def _open(
        self,
        parameters: Sequence[Sequence[torch.Tensor]],
        groups: Sequence[ParamGroup] | None = None,
    ) -> torch.optim.Optimizer:
        """The phase's optimizer over what it steps: DeepSpeed's compiled Adam where it can be."""
        phase, groups = self._phase, groups or self.groups
        offloaded = phase.offload_optimizer != "none"
        if offloaded and optimizers.plain_adam(phase.optimizer, phase.optimizer_args):
            values = [group_values(phase, group) for group in groups]
            compiled: torch.optim.Optimizer = DeepSpeedCPUAdam(
                [{**v, "params": p} for v, p in zip(values, parameters, strict=True)],
                adamw_mode=phase.optimizer == "adamw",
            )
            return compiled
        return open_optimizers(phase, groups, parameters)[0]

    def _all_slots(self) -> list[str]:
        return optimizers.slots(self._phase.optimizer, self._phase.optimizer_args)

    def load_loss_scale(self, found: dict[str, Any]) -> None:
        scaler = self._zero.loss_scaler
        if scaler.dynamic:
            found = fitted(found, self._phase.fp16)
            scaler.cur_scale, scaler.cur_hysteresis = found["scale"], found["hysteresis"]
            scaler.cur_iter, scaler.last_overflow_iter = found["good_steps"], -1

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
        if self._phase.mixed_precision != "fp16":
            return None
        scaler = self._zero.loss_scaler
        if not scaler.dynamic:
            return LossScale(self._phase.fp16).state()
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        # It doubles the scale at the step after the last one of a window, and counts on.
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
    """Groups of parameters for DeepSpeed to cut up; another optimizer steps its partitions.

    It would make the state of an Adagrad of whole parameters, and then an Adagrad of its own that
    has one group alone.
    """

    def __init__(self, parameters: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        super().__init__([{"params": part} for part in parameters], {"lr": 0.0})


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
