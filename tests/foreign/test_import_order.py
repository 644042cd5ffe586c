"""Who is who among the numbers of an optimizer: the run's groups and shapes say it, or names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.foreign.conftest import (
    DECAYED,
    NAMES,
    SPARED,
    Net,
    assert_moments,
    decay_split,
    read,
    shapes,
    trained_there,
)
from torch import nn

from zerotrain.errors import PipelineError
from zerotrain.state.external.fitting import Members, ModelOrder


def by_run(*groups: list[str], rates: tuple[float, ...] = ()) -> ModelOrder:
    """The order with param groups of the run."""

    def split(names: list[str]) -> list[Members]:
        given = rates or (None,) * len(groups)
        return [Members([n for n in names if n in group], {"lr": rate} if rate else {})
                for group, rate in zip(groups, given, strict=True)]  # fmt: skip

    return ModelOrder(module=shapes(Net()), split=split)


def test_the_decay_split_of_trainer_needs_no_hint(tmp_path: Path) -> None:
    """Matrices and vectors in two groups: no shape is in both, so that shapes tell."""
    model = trained_there(tmp_path / "there", decay_split)
    found = read(tmp_path / "there", model)
    assert_moments(found, model)
    groups = found.position.param_groups
    assert [group["parameters"] for group in groups] == [DECAYED, SPARED]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_a_group_without_members_is_no_riddle(tmp_path: Path) -> None:
    """Trainer gives a LoRA's optimizer a second group that is empty."""
    model = trained_there(
        tmp_path / "there", lambda own: [{"params": [*own.values()]}, {"params": []}]
    )
    assert_moments(read(tmp_path / "there", model), model)


def test_older_trainers_decay_norms_by_name(tmp_path: Path) -> None:
    """Only biases spared: vectors are in both groups, and exactly one known split fits."""

    def split(own: dict[str, Any]) -> Any:
        return [
            {"params": [p for n, p in own.items() if not n.endswith("bias")]},
            {"params": [p for n, p in own.items() if n.endswith("bias")], "weight_decay": 0.0},
        ]

    model = trained_there(tmp_path / "there", split)
    assert_moments(read(tmp_path / "there", model), model)


def test_the_runs_own_groups_say_who_is_who(tmp_path: Path) -> None:
    """Groups that no convention has, in another order than the run's: shapes match them."""
    second = ["second.weight", "norm.bias", "norm.weight"]
    ours = [n for n in NAMES if n in second]
    rest = [n for n in NAMES if n not in second]
    model = trained_there(
        tmp_path / "there",
        lambda own: [{"params": [own[n] for n in rest]}, {"params": [own[n] for n in ours]}],
    )
    without = read(tmp_path / "there", model)
    assert without.slots == ["master"]
    assert_moments(read(tmp_path / "there", model, by_run(ours, rest)), model)


LAYERS = (NAMES[:4], NAMES[4:])


def swapped(own: dict[str, Any]) -> Any:
    """Two groups whose shapes are the same, the later layers first."""
    return [
        {"params": [own[n] for n in LAYERS[1]], "lr": 0.1},
        {"params": [own[n] for n in LAYERS[0]], "lr": 0.01},
    ]


def test_equal_shapes_are_distinguished_by_the_groups_values(tmp_path: Path) -> None:
    """The run's groups have the rates of the optimizer's."""
    model = trained_there(tmp_path / "there", swapped)
    assert_moments(read(tmp_path / "there", model, by_run(*LAYERS, rates=(0.01, 0.1))), model)


def test_where_shapes_cannot_decide_names_do(tmp_path: Path) -> None:
    """Nothing is guessed: the sentence says what decides, and names are believed once they fit."""
    model = trained_there(tmp_path / "there", swapped)
    found = read(tmp_path / "there", model, by_run(*LAYERS))
    assert found.slots == ["master"]
    assert found.lost == [
        "the optimizer's moments: its 8 parameters in 2 groups have numbers, the weights 8 names, "
        "and neither shapes nor param_groups tell which is which; `names` of "
        "resume_from_checkpoint does"
    ]
    named = ModelOrder(module=shapes(model), names=[*LAYERS[1], *LAYERS[0]])
    assert_moments(read(tmp_path / "there", model, named), model)


def test_frozen_parameters_in_the_optimizer(tmp_path: Path) -> None:
    """AdamW(model.parameters()): frozen ones have numbers and no state; the trained keep theirs."""
    model = trained_there(tmp_path / "there", lambda own: own.values(), frozen="first")
    found = read(tmp_path / "there", model, ModelOrder(module=shapes(Net())))
    assert found.names == NAMES[2:]
    assert_moments(found, model)
    assert found.lost == []
    assert [g["parameters"] for g in found.position.param_groups] == [NAMES[2:]]


def test_frozen_parameters_in_both_groups(tmp_path: Path) -> None:
    """The same with two groups: the split of the whole module fits."""
    model = trained_there(tmp_path / "there", decay_split, frozen="first")
    found = read(tmp_path / "there", model, ModelOrder(module=shapes(Net())))
    assert_moments(found, model)
    assert [g["parameters"] for g in found.position.param_groups] == [["second.weight"], SPARED[1:]]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ([*NAMES[:-1]], "the optimizer has 8 parameters, 7 names were given"),
        ([*NAMES[1:], NAMES[0]], r"first.bias has shape \[4\], exp_avg of the .* 0 has \[4, 4\]"),
        ([*NAMES[:-1], "third.bias"], "names has third.bias, no parameter of the model"),
        ([*NAMES[:-1], "norm.weight"], "names has norm.weight twice"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, names: list[str], what: str) -> None:
    """With the first name that is wrong."""
    model = trained_there(tmp_path / "there", lambda own: own.values())
    with pytest.raises(PipelineError, match=what):
        read(tmp_path / "there", model, ModelOrder(module=shapes(model), names=names))


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Exchanged with another training's: of other counts, or of shapes that this model lacks."""
    model = trained_there(tmp_path / "there", lambda own: own.values())
    other = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.ones(4)).mean().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "there" / "optimizer.bin")
    with pytest.raises(PipelineError, match="the optimizer has 2 parameters, this run trains 8"):
        read(tmp_path / "there", model)
    document = optimizer.state_dict()
    group = document["param_groups"][0]
    state = {n: {k: torch.zeros(3) for k in ("exp_avg", "exp_avg_sq")} for n in range(8)}
    torch.save(
        {"state": state, "param_groups": [{**group, "params": [*range(8)]}]},
        tmp_path / "there" / "optimizer.bin",
    )
    with pytest.raises(PipelineError, match=r"parameter 0 has shape \[3\], as 0 of .* trains"):
        read(tmp_path / "there", model)
