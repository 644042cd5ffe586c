"""Groups of parameters that share learning rate and weight decay: the same under every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerotrain.config.parameter_patterns import check_pattern_matches, matches
from zerotrain.config.training import TrainConfig


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
