"""Which trained parameters share learning rate and weight decay: the same under every engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.trained import refuse_idle


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with one learning rate and one weight decay."""

    names: list[str]
    learning_rate: float
    """Peak of the schedule."""
    weight_decay: float

    def rate(self, learning_rate: float, phase: ResolvedPhase) -> float:
        """The group's rate at a step at which the phase's own is `learning_rate`."""
        if self.learning_rate == phase.learning_rate:
            return learning_rate
        return learning_rate * (self.learning_rate / phase.learning_rate)


class GroupValues(Protocol):
    """What sorts parameters into groups: a resolved phase has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def adam_weight_decay(self) -> float: ...
    @property
    def no_decay_norm_bias(self) -> bool: ...


def param_groups(phase: GroupValues, shapes: Mapping[str, Sequence[int]]) -> list[ParamGroup]:
    """Sort the trained parameters into groups: those with values of their own, then the rest.

    Args:
        phase: The resolved phase, or the values of one.
        shapes: The trained parameters, in the order of the model; under ZeRO-3 the whole shapes.

    Raises:
        PipelineError: a pattern fits no trained parameter.
    """
    left = names = list(shapes)
    groups: list[ParamGroup] = []

    def add(inside: list[str], rate: float, decay: float | None) -> None:
        if decay is not None:
            groups.append(ParamGroup(inside, rate, decay))
            return
        matrices = [name for name in inside if len(shapes[name]) > 1]
        groups.append(ParamGroup(matrices, rate, phase.adam_weight_decay))
        vectors = [name for name in inside if len(shapes[name]) <= 1]
        groups.append(ParamGroup(vectors, rate, 0.0))

    for group in phase.param_groups:
        for pattern in group["parameters"]:
            refuse_idle("param_groups", pattern, names)
        inside = [n for n in left if any(re.search(p, n) for p in group["parameters"])]
        left = [name for name in left if name not in set(inside)]
        add(inside, group["learning_rate"], group["adam_weight_decay"])
    spared = phase.no_decay_norm_bias
    add(left, phase.learning_rate, None if spared else phase.adam_weight_decay)
    return [group for group in groups if group.names]
