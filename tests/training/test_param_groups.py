"""Parameters are sorted into groups by their names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.training.optim.optimizer import param_groups

SHAPES = {"in.weight": [3, 2], "in.bias": [3], "norm.weight": [3], "norm.bias": [3],
          "out.weight": [2, 3], "out.bias": [2]}  # fmt: skip
NAMES = list(SHAPES)
VECTORS = [name for name, shape in SHAPES.items() if len(shape) == 1]


def phase(*groups: dict[str, Any], spared: bool = False) -> TrainConfig:
    """The section that the groups depend on."""
    return TrainConfig(
        learning_rate=1e-3, adam_weight_decay=0.1, param_groups=list(groups),
        no_decay_norm_bias=spared,
    )  # fmt: skip


def group(*patterns: str, rate: float = 1e-3, decay: float | None = 0.0) -> dict[str, Any]:
    """A resolved group."""
    return {"parameters": list(patterns), "learning_rate": rate, "adam_weight_decay": decay}


def test_without_groups_all_are_in_one() -> None:
    """With the phase's own values."""
    (found,) = param_groups(phase(), SHAPES)
    assert (found.names, found.learning_rate, found.weight_decay) == (NAMES, 1e-3, 0.1)


def test_the_first_group_that_fits_counts() -> None:
    """norm.bias fits both; every parameter is in one group, in the order of the model."""
    found = param_groups(phase(group("norm"), group(r"\.bias$", rate=2e-3)), SHAPES)
    assert [g.names for g in found] == [
        ["norm.weight", "norm.bias"],
        ["in.bias", "out.bias"],
        ["in.weight", "out.weight"],
    ]
    assert [g.weight_decay for g in found] == [0.0, 0.0, 0.1]


def test_a_group_follows_the_schedule_by_its_own_peak() -> None:
    """Where the phase is at a quarter of its rate, so is the group."""
    one = phase(group("norm", rate=4e-3))
    own, rest = param_groups(one, SHAPES)
    assert own.rate(2.5e-4, one) == pytest.approx(1e-3)
    assert rest.rate(2.5e-4, one) == 2.5e-4


def test_a_group_that_takes_all_leaves_no_empty_rest() -> None:
    """An optimizer refuses an empty group."""
    assert [g.names for g in param_groups(phase(group(".")), SHAPES)] == [NAMES]


def test_patterns_that_fit_nothing_are_refused() -> None:
    """A typing error must not leave a layer in another group than was meant."""
    with pytest.raises(PipelineError, match="param_groups: 'nrom' is in the name of none of the 6"):
        param_groups(phase(group("norm", "nrom")), SHAPES)


def test_no_decay_norm_bias_spares_vectors() -> None:
    """Biases and the weights of norms are a group without decay, at the phase's rate."""
    matrices, vectors = param_groups(phase(spared=True), SHAPES)
    assert (matrices.names, matrices.weight_decay) == (["in.weight", "out.weight"], 0.1)
    assert (vectors.names, vectors.weight_decay) == (VECTORS, 0.0)
    assert matrices.learning_rate == vectors.learning_rate == 1e-3


def test_no_decay_norm_bias_leaves_a_groups_own_decay() -> None:
    """A group that names a decay keeps it for its vectors; one without is spared."""
    own, rate = group("norm", decay=0.3), group("^in", rate=2e-3, decay=None)
    found = param_groups(phase(own, rate, spared=True), SHAPES)
    assert [(g.names, g.learning_rate, g.weight_decay) for g in found] == [
        (["norm.weight", "norm.bias"], 1e-3, 0.3),
        (["in.weight"], 2e-3, 0.1),
        (["in.bias"], 2e-3, 0.0),
        (["out.weight"], 1e-3, 0.1),
        (["out.bias"], 1e-3, 0.0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3", "zero2_offload"])
def test_no_decay_norm_bias_is_a_group_of_all_vectors(training, preset) -> None:
    """The same bits as with the names written out; with decay on everything they are others."""
    decay = {"adam_weight_decay": 0.5}
    training.run("spared", preset, 3, no_decay_norm_bias=True, **decay)
    first = training.checkpoint("spared", 3)
    groups = first.position.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    vectors = [name for name, shape in first.shapes.items() if len(shape) == 1]
    assert sorted(groups[1]["parameters"]) == sorted(vectors)
    assert {name.rpartition(".")[2] for name in vectors} == {"bias", "weight"}
    matrices = {"parameters": [f"^{re.escape(n)}$" for n in first.shapes if n not in vectors],
                "learning_rate": 1e-3, "adam_weight_decay": 0.5}  # fmt: skip
    training.run("named", preset, 3, param_groups=[matrices], adam_weight_decay=0.0)
    training.run("all", preset, 3, **decay)
    assert training.hashes("spared", 3) == training.hashes("named", 3)
    assert training.hashes("spared", 3) != training.hashes("all", 3)


def test_no_decay_norm_bias_with_an_adapter_of_matrices_alone(training) -> None:
    """LoRA's factors are matrices: there is nothing to spare, and no empty group."""
    lora = {"rank": 2, "alpha": 2.0, "dropout": 0.0, "target_modules": None, "use_rslora": False,
            "use_dora": False, "init_lora_weights": "default"}  # fmt: skip
    training.run("a", "torch", 2, lora=lora, no_decay_norm_bias=True)
    (group,) = training.checkpoint("a", 2).position.param_groups
    assert group["weight_decay"] == 0.1
