"""Another program's checkpoint under our model's names: nothing is guessed, nothing swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from zerotrain.errors import PipelineError
from zerotrain.state.external import open_external
from zerotrain.state.external.fitting import fit

TRAINED = {"0.weight": [4, 4], "0.bias": [4], "1.weight": [4, 4], "1.bias": [4]}


def trained_there(folder: Path, *groups: Any, wrap: str = "", pickled: bool = False) -> nn.Module:
    """Three AdamW steps of two equal layers, saved as accelerate does; the live optimizer's moments
    lie in `folder`.expected by our names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = dict(model.named_parameters())
    chosen = [{"params": [own[n] for n in group]} for group in groups] or model.parameters()
    optimizer = torch.optim.AdamW(chosen, lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir()
    weights = {wrap + name: tensor.detach().clone() for name, tensor in own.items()}
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    model.moments = {
        n: entry["exp_avg"] for n, p in own.items() if (entry := optimizer.state.get(p))
    }
    return model


def no_base(name: str) -> None:
    """A base of which nothing is frozen."""


@pytest.mark.parametrize(
    ("wrap", "pickled"), [("", False), ("module.", True), ("pipe.dit.", False)]
)
def test_numbers_of_one_group_follow_the_model(tmp_path: Path, wrap: str, pickled: bool) -> None:
    """Repeated shapes, as in every real model: each moment goes to its own parameter, whatever the
    order of names in the file and whatever stands before them."""
    live = trained_there(tmp_path / "there", wrap=wrap, pickled=pickled)
    found = fit(open_external(tmp_path / "there"), TRAINED, no_base)
    assert found.slots == ["master", "exp_avg", "exp_avg_sq"]
    assert found.shapes == TRAINED
    for name, tensor in live.named_parameters():
        assert torch.equal(found.tensor(name, "master"), tensor)
        assert torch.equal(found.tensor(name, "exp_avg"), live.moments[name])
    assert found.position.param_groups[0]["parameters"] == list(TRAINED)


def test_an_optimizer_that_names_its_parameters_is_believed(tmp_path: Path) -> None:
    """Two groups in another order than the model's, with names."""
    live = trained_there(tmp_path / "there", ["1.weight", "1.bias"], ["0.weight", "0.bias"])
    document = torch.load(tmp_path / "there" / "optimizer.bin")
    for group, layer in zip(document["param_groups"], "10", strict=True):
        group["param_names"] = [f"{layer}.weight", f"{layer}.bias"]
    torch.save(document, tmp_path / "there" / "optimizer.bin")
    found = fit(open_external(tmp_path / "there"), TRAINED, no_base)
    for name in TRAINED:
        assert torch.equal(found.tensor(name, "exp_avg"), live.moments[name])


def test_what_was_frozen_has_to_be_the_bases(tmp_path: Path) -> None:
    """A base with other values there would make a mixture that no one has trained."""
    live = trained_there(tmp_path / "there", ["1.weight", "1.bias"])
    trained = {name: TRAINED[name] for name in ("1.weight", "1.bias")}
    own = {name: tensor.detach() for name, tensor in live.named_parameters()}
    found = fit(open_external(tmp_path / "there"), trained, own.get)
    assert found.shapes == trained
    assert torch.equal(found.tensor("1.weight", "exp_avg"), live.moments["1.weight"])
    other = {**own, "0.bias": own["0.bias"] + 1}
    with pytest.raises(
        PipelineError, match=r"0\.bias was frozen there, with other values"
    ) as caught:
        fit(open_external(tmp_path / "there"), trained, other.get)
    assert "name the base that this training began with" in str(caught.value)
