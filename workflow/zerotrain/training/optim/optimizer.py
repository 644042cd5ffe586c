"""A phase's optimizer as a torch class: how it is built, scheduled, and recorded in a state.

The engines differ in what they step: flat tensors of many parameters, parts of such, or whole
parameters. Groups share learning rate and weight decay, the same under every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from zerotrain.config import optimizers
from zerotrain.config.trained_part import check_pattern_matches, matches
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training.optim.prodigy import Prodigy

Parameters = Sequence[torch.Tensor]
ONE_BY_ONE = {"foreach": False}
"""torch's plain loop over tensors: an engine has a few large ones, which foreach would copy."""


def group_values(phase: ResolvedPhase, group: ParamGroup) -> dict[str, Any]:
    """Return a group as the optimizer takes it, except for `params`.

    Every value is explicit: DeepSpeed's and torch's defaults differ.
    """
    arguments = {
        k: tuple(v) if isinstance(v, list) else v for k, v in phase.train.optimizer_args.items()
    }
    return {**_shared_values(phase, group), **arguments}


def _shared_values(phase: ResolvedPhase, group: ParamGroup) -> dict[str, Any]:
    table, _ = optimizers.find(phase.train.optimizer)
    values: dict[str, Any] = {"lr": group.learning_rate}
    if table.adam_keys:
        values |= {
            "betas": (phase.train.adam_beta1, phase.train.adam_beta2),
            "eps": phase.train.adam_epsilon,
        }
    if table.weight_decay is not None:
        values["weight_decay"] = group.weight_decay
    return values


def open_optimizers(
    phase: ResolvedPhase, groups: Sequence[ParamGroup], parameters: Sequence[Parameters]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that together step a phase's parameters: one, or two for Muon.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) steps the matrices, and
    AdamW the rest, at the same rate and weight decay.

    Args:
        phase: The resolved phase.
        groups: Its groups of parameters.
        parameters: The tensors to step of each group; every optimizer here has as many groups.

    Raises:
        PipelineError: torch's class refuses a value.
    """
    if phase.train.optimizer == "muon":
        adam = [_shared_values(phase, group) for group in groups]
        muon = [group_values(phase, group) for group in groups]
        for values in muon:
            del values["betas"]
            default = optimizers.find(phase.train.optimizer)[0].arguments["eps"]
            values |= {"eps": phase.train.optimizer_args.get("eps", default)}
        return [
            _open(phase, torch.optim.Muon, muon, [_select(p, matrix=True) for p in parameters]),
            _open(
                phase, torch.optim.AdamW, adam, [_select(p, matrix=False) for p in parameters],
                fused=True,
            ),
        ]  # fmt: skip
    table, _ = optimizers.find(phase.train.optimizer)
    own = [group_values(phase, group) for group in groups]
    if phase.train.optimizer == "lion":
        return [_open(phase, Lion, own, parameters)]
    if phase.train.optimizer == "prodigy":
        return [_open(phase, Prodigy, own, parameters)]
    if phase.train.optimizer == "adamw8bit":
        return [_open(phase, _adamw_8bit(phase), own, parameters)]
    how = {"fused": True} if phase.train.optimizer in ("adamw", "adam") else ONE_BY_ONE
    return [_open(phase, getattr(torch.optim, table.title), own, parameters, **how)]


def _adamw_8bit(phase: ResolvedPhase) -> Callable[..., torch.optim.Optimizer]:
    """Return the class, if its package is installed.

    Raises:
        PipelineError: the package cannot be imported.
    """
    try:
        from zerotrain.training.optim.adamw_8bit import AdamW8bit
    except ImportError as error:
        raise PipelineError(
            f"phase {phase.phase}: optimizer adamw8bit needs bitsandbytes, which cannot be "
            f"imported here ({error})",
            hint="install it (`pip install bitsandbytes`); or optimizer: adamw, with launch: "
            "zero2_offload where its moments do not fit the GPU",
        ) from error
    optimizer_class: Callable[..., torch.optim.Optimizer] = AdamW8bit
    return optimizer_class


def read_slot(optimizer: torch.optim.Optimizer, stepped: torch.Tensor, slot: str) -> torch.Tensor:
    """Return a stepped tensor's slot by torch's name, as float32."""
    if isinstance(optimizer, Packed):
        return optimizer.read_slot(stepped, slot)
    values: torch.Tensor = optimizer.state[stepped][slot]
    return values


@runtime_checkable
class Packed(Protocol):
    """An optimizer with a state in another format than a checkpoint's."""

    def read_slot(self, parameter: torch.Tensor, slot: str) -> torch.Tensor:
        """Return a slot as float32 in the parameter's shape."""

    def fill(
        self, parameter: torch.Tensor, updates: int, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """Load slots and the count of updates."""


def _select(parameters: Parameters, *, matrix: bool) -> Parameters:
    return [parameter for parameter in parameters if (parameter.ndim == 2) == matrix]


def _open(
    phase: ResolvedPhase,
    make: Callable[..., torch.optim.Optimizer],
    values: Sequence[dict[str, Any]],
    parameters: Sequence[Parameters],
    **how: Any,
) -> torch.optim.Optimizer:
    groups = [{**own, "params": list(part)} for own, part in zip(values, parameters, strict=True)]
    try:
        # A class validates its arguments, but not the same values in a group.
        return make(groups, **values[0], **how)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"phase {phase.phase}: optimizer {phase.train.optimizer} refuses its values: {error}",
            hint="change optimizer_args; docs/optimizers.md lists what it takes",
        ) from error


def set_hyperparameters(
    param_groups: Iterable[dict[str, Any]],
    groups: Sequence[ParamGroup],
    phase: ResolvedPhase,
    learning_rate: float,
    beta1: float | None,
) -> None:
    """Set the schedule's values for the coming step in an optimizer's groups.

    Args:
        param_groups: The optimizer's groups, in the order of `groups`.
        groups: The phase's groups.
        phase: The resolved phase.
        learning_rate: The phase's rate at this step.
        beta1: Replaces the first beta, or the momentum; None keeps it.

    Raises:
        PipelineError: the optimizer has neither.
    """
    for values, group in zip(param_groups, groups, strict=True):
        values["lr"] = group.rate(learning_rate, phase.train)
        if beta1 is None:
            continue
        if "betas" in values:
            values["betas"] = (beta1, values["betas"][1])
        elif values.get("momentum"):
            values["momentum"] = beta1
        else:
            raise PipelineError(
                f"phase {phase.phase}: the schedule changes the momentum, and optimizer "
                f"{phase.train.optimizer} has none",
                hint="turn cycle_momentum off, or give optimizer_args: {momentum: 0.9}",
            )


def describe_group(
    phase: ResolvedPhase,
    group: ParamGroup,
    learning_rate: float,
    beta1: float | None,
    scalars: Mapping[str, float],
) -> dict[str, Any]:
    """Return a group as a position records it, at a step with this phase's rate and first beta."""
    described: dict[str, Any] = {"parameters": group.names, **_shared_values(phase, group)}
    described["lr"] = group.rate(learning_rate, phase.train)
    if "betas" in described:
        described["betas"] = [
            phase.train.adam_beta1 if beta1 is None else beta1,
            phase.train.adam_beta2,
        ]
    if phase.train.optimizer_args:
        described["optimizer_args"] = phase.train.optimizer_args
    return {**described, "scalars": dict(scalars)} if scalars else described


def scalars_of(phase: ResolvedPhase, state: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of one tensor's state except for the step count: those of its group."""
    table, _ = optimizers.find(phase.train.optimizer)
    return {key: float(state[key]) for key in table.scalars if key in state}


def group_scalars(
    phase: ResolvedPhase, groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """Return the scalars that each group continues with, from the param_groups of a position.

    Raises:
        PipelineError: parameters with different scalars are one group now.
    """
    scalars: list[dict[str, float]] = []
    for group in groups:
        inside = set(group.names)
        numbers = [
            dict(entry.get("scalars", {}))
            for entry in saved
            if inside.intersection(entry["parameters"])
        ]
        if any(one != numbers[0] for one in numbers):
            raise PipelineError(
                f"phase {phase.phase}: {phase.train.optimizer} has other values of "
                f"{', '.join(numbers[0])} for parameters that are one group now",
                hint="keep the param_groups of the phase before",
            )
        scalars.append(numbers[0] if numbers else {})
    return scalars


def probe_scalar_state(
    optimizer: Callable[[torch.nn.Parameter], torch.optim.Optimizer],
    slots: Iterable[str],
    device: torch.device,
    shape: tuple[int, ...] = (2,),
) -> dict[str, Any]:
    """Return what the optimizer keeps of a tensor in addition to its slots.

    The values come from one step of a small tensor, so type and device are the optimizer's choice.
    """
    small = torch.nn.Parameter(torch.zeros(shape, device=device))
    small.grad = torch.zeros_like(small)
    made = optimizer(small)
    made.step()
    return {key: value for key, value in made.state[small].items() if key not in set(slots)}


def scalar_state_like(
    template: Mapping[str, Any], optimizer_step: int, scalars: Mapping[str, float]
) -> dict[str, Any]:
    """Return a result of `probe_scalar_state` with these values.

    In new tensors, since torch counts in place.
    """
    values = {"step": optimizer_step, **scalars}
    return {
        key: torch.full_like(old, values[key]) if isinstance(old, torch.Tensor) else values[key]
        for key, old in template.items()
    }


class Lion(torch.optim.Optimizer):
    """Optimizer that steps by the sign of a momentum, interpolated twice.

    Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023),
    https://arxiv.org/abs/2302.06675, algorithm 2:
        c = beta1 m + (1 - beta1) g;  w = w - lr (sign(c) + weight_decay w);
        m = beta2 m + (1 - beta2) g.

    Args:
        params: Parameters, or groups of them with separate values.
        lr: Learning rate.
        betas: Interpolation factors of the step and of the momentum, each in [0, 1).
        weight_decay: Decoupled weight decay.

    Raises:
        ValueError: a value outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr {lr} and weight_decay {weight_decay} must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} must be in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weights)
                momentum = state["exp_avg"]
                weights.mul_(1 - rate * group["weight_decay"])
                weights.add_(momentum.lerp(weights.grad, 1 - beta1).sign_(), alpha=-rate)
                momentum.lerp_(weights.grad, 1 - beta2)
        return loss


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with one learning rate and one weight decay."""

    names: list[str]
    learning_rate: float
    """Peak of the schedule."""
    weight_decay: float

    def rate(self, learning_rate: float, train: TrainConfig) -> float:
        """Return the group's rate at a step where the phase's rate is `learning_rate`."""
        if self.learning_rate == train.learning_rate:
            return learning_rate
        return learning_rate * (self.learning_rate / train.learning_rate)


def param_groups(train: TrainConfig, shapes: Mapping[str, Sequence[int]]) -> list[ParamGroup]:
    """Sort the trained parameters into groups: those of `param_groups`, then the rest.

    Args:
        train: The phase's `train` section.
        shapes: Shapes of the trained parameters, in model order; under ZeRO-3 the whole shapes.

    Raises:
        PipelineError: a pattern matches no trained parameter.
    """
    left = names = list(shapes)
    groups: list[ParamGroup] = []

    def add(inside: list[str], rate: float, decay: float | None) -> None:
        if decay is not None:
            groups.append(ParamGroup(inside, rate, decay))
            return
        matrices = [name for name in inside if len(shapes[name]) > 1]
        groups.append(ParamGroup(matrices, rate, train.adam_weight_decay))
        vectors = [name for name in inside if len(shapes[name]) <= 1]
        groups.append(ParamGroup(vectors, rate, 0.0))

    decay = None if train.no_decay_norm_bias else train.adam_weight_decay
    for group in train.param_groups:
        for pattern in group.parameters:
            check_pattern_matches("param_groups", pattern, names)
        inside = [n for n in left if any(matches(p, n) for p in group.parameters)]
        left = [name for name in left if name not in set(inside)]
        add(
            inside,
            train.learning_rate if group.learning_rate is None else group.learning_rate,
            decay if group.adam_weight_decay is None else group.adam_weight_decay,
        )
    add(left, train.learning_rate, decay)
    return [group for group in groups if group.names]
