"""LoRAs whose layers have ranks and alphas of their own start a run of one rank and alpha."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.builders.exports import IMPORTING_RUN
from tests.builders.refusals import refused
from tests.training.conftest import write_base

from zerotrain.config.read import parse_config
from zerotrain.models.families.sdxl import FAMILY
from zerotrain.models.trainable import choose_trained, trained_parameters
from zerotrain.stages.import_checkpoint import ImportSettings, import_checkpoint
from zerotrain.state.external import open_external
from zerotrain.state.state import State

RUN = {"rank": 8, "alpha": 4.0, "dropout": 0.0, "target_modules": ["to_q", "to_v", "proj_in"]}
RANKS = {"to_q": 2, "to_v": 8, "proj_in": 4}
ALPHAS = {"to_q": 1.0, "to_v": 6.0, "proj_in": 4.0}
FORMS = ["kohya", "kohya without alpha", "dotted", "dotted without alpha", "header", "peft"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A U-Net with attention."""
    folder: Path = tmp_path_factory.mktemp("base") / "base"
    write_base(folder, (9, 15))
    return folder


@pytest.fixture(scope="module")
def shapes(base: Path) -> dict[str, list[int]]:
    """The shapes of the run's parameters."""
    model = choose_trained(FAMILY.empty_model(base), RUN, [], 1)
    return {name: list(p.shape) for name, p in trained_parameters(model).items()}


def end_of(layer: str) -> str:
    return next(end for end in RANKS if layer.endswith(end))


def write(form: str, shapes: dict[str, list[int]], out: Path, **config: Any) -> Any:
    """A LoRA's file, and the product that it adds to each layer's weight."""
    source = torch.Generator().manual_seed(3)
    tensors, effects = {}, {}
    for layer in [name.partition(".lora_")[0] for name in shapes if ".lora_A." in name]:
        first, second = (shapes[f"{layer}.lora_{letter}.default.weight"] for letter in "AB")
        rank, alpha = RANKS[end_of(layer)], ALPHAS[end_of(layer)]
        down = torch.randn(rank, *first[1:], generator=source)
        up = torch.randn(second[0], rank, *second[2:], generator=source)
        scale = 1.0 if "without" in form else alpha / rank
        if config.get("use_rslora"):
            scale = alpha / math.sqrt(rank)
        effects[layer] = scale * up.flatten(1) @ down.flatten(1)
        kohya = form.startswith("kohya")
        stem = {"k": "lora_unet_" + layer.replace(".", "_"), "p": f"base_model.model.{layer}"}.get(
            form[0], f"unet.{layer}"
        )
        ends = ("lora_down", "lora_up") if kohya else ("lora_A", "lora_B")
        tensors |= {f"{stem}.{ends[0]}.weight": down, f"{stem}.{ends[1]}.weight": up}
        if form in ("kohya", "dotted"):
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    settings = {"r": 4, "lora_alpha": 4.0, **config,
                "rank_pattern": {"to_q": 2, "to_v": 8},
                "alpha_pattern": {"attn[12].to_q": 1.0, "to_v": 6.0}}  # fmt: skip
    named = {"lora_adapter_metadata": json.dumps({f"unet.{k}": v for k, v in settings.items()})}
    out.mkdir(exist_ok=True)
    if form == "peft":
        (out / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "LORA"}))
    file = out / ("adapter_model.safetensors" if form == "peft" else "cat.safetensors")
    save_file(tensors, file, metadata=named if form == "header" else None)
    return file, effects


def imported(path: Path, base: Path, state: Path, **lora: Any) -> State:
    config = parse_config({**IMPORTING_RUN, "lora": {**RUN, **lora}}, "c")
    import_checkpoint(ImportSettings.of(config), path, base, state)
    return State(state)


def assert_effects(state: State, effects: Any, scale: float) -> None:
    """The run's scale * B @ A of each layer is what the file adds by hand."""
    for layer, expected in effects.items():
        first, second = (
            state.tensor(f"{layer}.lora_{letter}.default.weight", "master") for letter in "AB"
        )
        found = scale * second.flatten(1) @ first.flatten(1)
        apart = ((found - expected).norm() / expected.norm()).item()
        assert apart < 1e-6, (layer, apart)


@pytest.mark.parametrize("form", FORMS)
def test_each_layer_keeps_its_effect(
    base: Path, shapes: Any, tmp_path: Path, form: str, capsys: Any
) -> None:
    """Of its own alpha / rank, without alpha of B @ A, at the run's rank and alpha."""
    file, effects = write(form, shapes, tmp_path / "there")
    state = imported(file, base, tmp_path / "state")
    assert_effects(state, effects, 4.0 / 8)
    said = capsys.readouterr().err
    assert "its layers have the ranks 2 (" in said
    assert "each keeps its effect at rank 8 and scale 0.5" in said
    assert "alpha: cat.safetensors does not say it" not in said
    layer = next(one for one in effects if one.endswith("to_q"))
    first, second = (
        state.tensor(f"{layer}.lora_{letter}.default.weight", "master") for letter in "AB"
    )
    assert not second[:, 2:].any()
    assert first[2:].abs().min() > 0  # they are trained from the first step on


def test_rslora_divides_by_the_root_of_each_rank(base: Path, shapes: Any, tmp_path: Path) -> None:
    """On both sides: a file of rsLoRA in a plain run, and in one of rsLoRA."""
    file, effects = write("peft", shapes, tmp_path / "there", use_rslora=True)
    assert_effects(imported(file, base, tmp_path / "plain"), effects, 4.0 / 8)
    own = imported(file, base, tmp_path / "own", use_rslora=True)
    assert_effects(own, effects, 4.0 / math.sqrt(8))


def test_a_smaller_rank_of_the_run_is_refused_with_the_ranks(
    base: Path, shapes: Any, tmp_path: Path
) -> None:
    file, _ = write("kohya", shapes, tmp_path / "there")
    error = refused(imported, file, base, tmp_path / "state", rank=4)
    assert "its layers have the ranks 2 (lora_unet_" in error.what
    assert error.what.endswith("; this run trains rank 4")
    assert error.hint == (
        "set lora.rank: 8; each layer keeps its own scale, whatever lora.alpha is"
    )


def test_moments_of_the_factors_are_left_out(base: Path, shapes: Any, tmp_path: Path) -> None:
    """Rescaled factors have other gradients."""
    file, _ = write("peft", shapes, tmp_path / "checkpoint-3")
    numbers = range(len(shapes))
    state = {n: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": 3} for n in numbers}
    groups = [{"params": [*numbers], "lr": 1e-3}]
    torch.save({"state": state, "param_groups": groups}, file.parent / "optimizer.pt")
    error = refused(imported, file.parent, base, tmp_path / "state")
    assert (
        "the optimizer's moments: they are of the factors before they were rescaled" in error.what
    )
    assert "allow: [moments]" in str(error.hint)


def test_an_alpha_without_factors_is_named(tmp_path: Path) -> None:
    tensors = {
        "lora_unet_q.lora_down.weight": torch.ones(2, 4),
        "lora_unet_q.lora_up.weight": torch.ones(4, 2),
        "lora_unet_q.alpha": torch.tensor(1.0),
        "lora_unet_k.alpha": torch.tensor(8.0),
    }
    save_file(tensors, tmp_path / "cat.safetensors")
    found = open_external(tmp_path / "cat.safetensors")
    assert found.adapter == {"lora_alpha": 1.0}
    assert "the alpha of lora_unet_k, of which the file has no factors" in found.lost
