"""Parameters are sorted into groups by their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerotrain.errors import PipelineError
from zerotrain.training.param_groups import param_groups

NAMES = ["in.weight", "in.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"]


def phase(*groups: dict[str, Any]) -> Any:
    """What of a phase the groups depend on."""
    return SimpleNamespace(learning_rate=1e-3, adam_weight_decay=0.1, param_groups=list(groups))


def group(*patterns: str, rate: float = 1e-3, decay: float = 0.0) -> dict[str, Any]:
    """A resolved group."""
    return {"parameters": list(patterns), "learning_rate": rate, "adam_weight_decay": decay}


def test_without_groups_all_are_in_one() -> None:
    """With the phase's own values."""
    (found,) = param_groups(phase(), NAMES)
    assert (found.names, found.learning_rate, found.weight_decay) == (NAMES, 1e-3, 0.1)


def test_the_first_group_that_fits_counts() -> None:
    """norm.bias fits both; every parameter is in one group, in the order of the model."""
    found = param_groups(phase(group("norm"), group(r"\.bias$", rate=2e-3)), NAMES)
    assert [g.names for g in found] == [
        ["norm.weight", "norm.bias"],
        ["in.bias", "out.bias"],
        ["in.weight", "out.weight"],
    ]
    assert [g.weight_decay for g in found] == [0.0, 0.0, 0.1]


def test_a_group_follows_the_schedule_by_its_own_peak() -> None:
    """Where the phase is at a quarter of its rate, so is the group."""
    one = phase(group("norm", rate=4e-3))
    own, rest = param_groups(one, NAMES)
    assert own.rate(2.5e-4, one) == pytest.approx(1e-3)
    assert rest.rate(2.5e-4, one) == 2.5e-4


def test_a_group_that_takes_all_leaves_no_empty_rest() -> None:
    """An optimizer refuses an empty group."""
    assert [g.names for g in param_groups(phase(group(".")), NAMES)] == [NAMES]


def test_patterns_that_fit_nothing_are_refused() -> None:
    """A typing error must not leave a layer in another group than was meant."""
    with pytest.raises(PipelineError, match="param_groups: 'nrom' is in the name of none of the 6"):
        param_groups(phase(group("norm", "nrom")), NAMES)
