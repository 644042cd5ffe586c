"""Which parameters are trained: those that are not frozen, or an adapter's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.builders.models import make_unet
from tests.builders.refusals import refusal

from zerotrain.errors import PipelineError
from zerotrain.models.trainable import check_same_parameters, choose_trained, trained_parameters


def test_all_are_trained_but_the_frozen_ones() -> None:
    """And something must be left to train."""
    model = torch.nn.Linear(2, 2)
    choose_trained(model, None, [], 0)
    assert list(trained_parameters(model)) == ["weight", "bias"]
    choose_trained(model, None, ["bias"], 0)
    assert list(trained_parameters(model)) == ["weight"]
    with pytest.raises(PipelineError, match="leave no parameter to train"):
        choose_trained(model, None, ["weight"], 0)


def test_chosen_parameters_alone_are_trained() -> None:
    """But for those that are frozen all the same."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    choose_trained(model, None, ["bias"], 0, ["^1\\."])
    assert list(trained_parameters(model)) == ["1.weight"]
    with pytest.raises(PipelineError, match="to train of trainable_parameters: 1"):
        choose_trained(model, None, ["1"], 0, ["1"])


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    """A typing error must not train a layer that was to be frozen."""
    with pytest.raises(PipelineError, match="trainable_parameters: 'inn' is in the name of none"):
        choose_trained(torch.nn.Linear(2, 2), None, [], 0, ["weight", "inn"])
    with pytest.raises(PipelineError, match="frozen_parameters: 'inn' is in the name of none of"):
        choose_trained(torch.nn.Linear(2, 2), None, ["weight", "inn"], 0)


def test_an_adapter_is_all_that_is_trained_also_without_weights() -> None:
    """A model on the meta device has the names and shapes of a real one: imports ask it."""
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": ["to_q"]}
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = make_unet((4, 8), groups=2, text=8, attention_head_dim=2)
        choose_trained(model, lora, [], 7)
        found.append({name: list(p.shape) for name, p in trained_parameters(model).items()})
    assert found[0] == found[1]
    assert {name.split(".")[-3] for name in found[0]} == {"lora_A", "lora_B"}
    assert {tuple(shape) for name, shape in found[0].items() if "lora_A" in name} == {(2, 8)}


@pytest.mark.parametrize(
    ("found", "trained", "message"),
    [
        ({"w": [2]}, {"w": [3]}, "w has shape [2], the model that is trained has [3]"),
        ({}, {"w": [3]}, "w has shape none: it is absent, the model that is trained has [3]"),
        ({"w": [2]}, {}, "w has shape [2], the model that is trained has no such trained"),
    ],
)
def test_parameters_of_another_model_are_named(found, trained, message) -> None:
    """The first that is missing, surplus or of another shape."""
    assert f"there: {message}" in refusal(check_same_parameters, found, trained, Path("there"))
