"""A phase's optimizer as torch's class: built, driven by the schedule, and what a state has of it.

The engines differ in what they step: flat tensors of many parameters, parts of such, or whole
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from zerotrain import optimizers
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training.lion import Lion
from zerotrain.training.param_groups import ParamGroup

Parameters = Sequence[torch.Tensor]
ONE_BY_ONE = {"foreach": False}
"""torch's plain loop over tensors: an engine has few and large ones, and needs no copies of all."""


def group_values(phase: ResolvedPhase, group: ParamGroup) -> dict[str, Any]:
    """A group as the optimizer takes it, but for `params`. Every value is written: DeepSpeed's and
    torch's defaults differ."""
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in phase.optimizer_args.items()}
    return {**_shared_values(phase, group), **arguments}


def _shared_values(phase: ResolvedPhase, group: ParamGroup) -> dict[str, Any]:
    table, _ = optimizers.find(phase.optimizer)
    values: dict[str, Any] = {"lr": group.learning_rate}
    if table.adam_keys:
        values |= {"betas": (phase.adam_beta1, phase.adam_beta2), "eps": phase.adam_epsilon}
    if table.weight_decay is not None:
        values["weight_decay"] = group.weight_decay
    return values


def open_optimizers(
    phase: ResolvedPhase, groups: Sequence[ParamGroup], parameters: Sequence[Parameters]
) -> list[torch.optim.Optimizer]:
    """The optimizers that together step a phase's parameters: one, but for Muon.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) takes the matrices, and
    AdamW the rest, at the same rate and weight decay.

    Args:
        phase: The resolved phase.
        groups: Its groups of parameters.
        parameters: What is stepped of each; every optimizer here has as many groups.

    Raises:
        PipelineError: torch's class refuses a value.
    """
    if phase.optimizer == "muon":
        adam = [_shared_values(phase, group) for group in groups]
        muon = [group_values(phase, group) for group in groups]
        for values in muon:
            del values["betas"]
            values |= {"eps": phase.optimizer_args.get("eps", _default(phase, "eps"))}
        return [
            _open(phase, torch.optim.Muon, muon, [_of(p, matrix=True) for p in parameters]),
            _open(
                phase, torch.optim.AdamW, adam, [_of(p, matrix=False) for p in parameters],
                fused=True,
            ),
        ]  # fmt: skip
    table, _ = optimizers.find(phase.optimizer)
    own = [group_values(phase, group) for group in groups]
    if phase.optimizer == "lion":
        return [_open(phase, Lion, own, parameters)]
    if phase.optimizer == "adamw8bit":
        return [_open(phase, _adamw_8bit(phase), own, parameters)]
    how = {"fused": True} if phase.optimizer in ("adamw", "adam") else ONE_BY_ONE
    return [_open(phase, getattr(torch.optim, table.title), own, parameters, **how)]


def _adamw_8bit(phase: ResolvedPhase) -> Callable[..., torch.optim.Optimizer]:
    """The class, where the package is that has it.

    Raises:
        PipelineError: it is not installed.
    """
    try:
        from zerotrain.training.adamw_8bit import AdamW8bit
    except ImportError as error:
        raise PipelineError(
            f"phase {phase.phase}: optimizer adamw8bit needs bitsandbytes, which cannot be "
            f"imported here ({error})",
            hint="install it (`pip install bitsandbytes`); or optimizer: adamw, with launch: "
            "zero2_offload where its moments do not fit the GPU",
        ) from error
    found: Callable[..., torch.optim.Optimizer] = AdamW8bit
    return found


def read_slot(optimizer: torch.optim.Optimizer, stepped: torch.Tensor, slot: str) -> torch.Tensor:
    """What an optimizer keeps of what it steps, float32, under torch's name."""
    if isinstance(optimizer, Packed):
        return optimizer.read_slot(stepped, slot)
    found: torch.Tensor = optimizer.state[stepped][slot]
    return found


@runtime_checkable
class Packed(Protocol):
    """An optimizer whose own state is not what a checkpoint holds."""

    def read_slot(self, parameter: torch.Tensor, slot: str) -> torch.Tensor:
        """A slot, float32 of the parameter's shape."""

    def fill(
        self, parameter: torch.Tensor, updates: int, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """Take slots over, with the count of updates."""


def _default(phase: ResolvedPhase, key: str) -> Any:
    return optimizers.find(phase.optimizer)[0].arguments[key]


def _of(parameters: Parameters, *, matrix: bool) -> Parameters:
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
        # A class looks at its arguments, and not at the same values in a group.
        return make(groups, **values[0], **how)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"phase {phase.phase}: optimizer {phase.optimizer} refuses its values: {error}",
            hint="change optimizer_args; docs/optimizers.md lists what it takes",
        ) from error


def drive(
    driven: Iterable[dict[str, Any]],
    groups: Sequence[ParamGroup],
    phase: ResolvedPhase,
    learning_rate: float,
    beta1: float | None,
) -> None:
    """Set what the schedule gives for the coming step in an optimizer's groups.

    Args:
        driven: The optimizer's groups, in the order of `groups`.
        groups: The phase's.
        phase: The resolved phase.
        learning_rate: The phase's own at this step.
        beta1: Replaces the first beta, or the momentum; None leaves it.

    Raises:
        PipelineError: there is none to replace.
    """
    for values, group in zip(driven, groups, strict=True):
        values["lr"] = group.rate(learning_rate, phase)
        if beta1 is None:
            continue
        if "betas" in values:
            values["betas"] = (beta1, values["betas"][1])
        elif values.get("momentum"):
            values["momentum"] = beta1
        else:
            raise PipelineError(
                f"phase {phase.phase}: the schedule changes the momentum, and optimizer "
                f"{phase.optimizer} has none",
                hint="turn cycle_momentum off, or give optimizer_args: {momentum: 0.9}",
            )


def describe_group(
    phase: ResolvedPhase,
    group: ParamGroup,
    learning_rate: float,
    beta1: float | None,
    scalars: Mapping[str, float],
) -> dict[str, Any]:
    """A group as a position has it, at a step with this rate of the phase and this first beta."""
    found: dict[str, Any] = {"parameters": group.names, **_shared_values(phase, group)}
    found["lr"] = group.rate(learning_rate, phase)
    if "betas" in found:
        found["betas"] = [phase.adam_beta1 if beta1 is None else beta1, phase.adam_beta2]
    if phase.optimizer_args:
        found["optimizer_args"] = phase.optimizer_args
    return {**found, "scalars": dict(scalars)} if scalars else found


def scalars_of(phase: ResolvedPhase, state: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one tensor's state that are not the count of steps: those of its group."""
    table, _ = optimizers.find(phase.optimizer)
    return {key: float(state[key]) for key in table.scalars if key in state}


def group_scalars(
    phase: ResolvedPhase, groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """The numbers that each group goes on with, from the param_groups of a position.

    Raises:
        PipelineError: parameters with different numbers are one group now.
    """
    found: list[dict[str, float]] = []
    for group in groups:
        inside = set(group.names)
        numbers = [
            dict(entry.get("scalars", {}))
            for entry in saved
            if inside.intersection(entry["parameters"])
        ]
        if any(one != numbers[0] for one in numbers):
            raise PipelineError(
                f"phase {phase.phase}: {phase.optimizer} has other values of "
                f"{', '.join(numbers[0])} for parameters that are one group now",
                hint="keep the param_groups of the phase before",
            )
        found.append(numbers[0] if numbers else {})
    return found


def counters(
    optimizer: Callable[[torch.nn.Parameter], torch.optim.Optimizer],
    slots: Iterable[str],
    device: torch.device,
    shape: tuple[int, ...] = (2,),
) -> dict[str, Any]:
    """What the optimizer keeps of a tensor beside its slots, in the type and place that it chooses:
    asked of a small one that is stepped once."""
    small = torch.nn.Parameter(torch.zeros(shape, device=device))
    small.grad = torch.zeros_like(small)
    made = optimizer(small)
    made.step()
    return {key: value for key, value in made.state[small].items() if key not in set(slots)}


def filled(
    template: Mapping[str, Any], optimizer_step: int, scalars: Mapping[str, float]
) -> dict[str, Any]:
    """What `counters` gave, for a tensor of its own: torch counts in place."""
    values = {"step": optimizer_step, **scalars}
    return {
        key: torch.full_like(old, values[key]) if isinstance(old, torch.Tensor) else values[key]
        for key, old in template.items()
    }
