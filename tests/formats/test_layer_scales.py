"""LoRAs whose layers have ranks and alphas of their own: each layer is scaled by its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from tests.builders.images import publish_nano
from tests.families.texts import LORA
from tests.formats.languages import Language

from zerotrain.export.formats.kohya import name_of
from zerotrain.export.formats.opening import open_pipeline
from zerotrain.export.formats.original import SLOTS, layers_by_slot
from zerotrain.export.generate import open_language_model
from zerotrain.models.families import load_family

RANKS, ALPHAS = (4, 2, 8, 4, 6), (4.0, 1.0, 2.0, 6.0, 3.0)
TARGETS = re.compile(r"(?!single).*\.(attn\d?\.to_[qkv]|ff\.net\.2|proj_in)\.weight")
"""Layers of which several are one in the original, and others."""
Deltas = dict[str, torch.Tensor]
FORMS = ["kohya", "kohya without alpha", "dotted", "dotted without alpha", "header", "peft"]
"""All of SDXL; names of kohya are a table for each family."""


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's nano base, its denoiser, and the layers that are one in the original."""
    folder = publish_nano(request.param, tmp_path_factory.mktemp("base") / request.param)
    family = load_family(request.param)
    empty = family.empty_model(folder)
    config = json.loads((folder / family.trained_part / "config.json").read_text())
    held = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    slots = {
        slot: layers
        for slot, layers in layers_by_slot(held, SLOTS[family.name](config)).items()
        if TARGETS.fullmatch(f"{layers[0]}.weight")
    }
    return (
        folder,
        family.trained_part,
        slots,
        {n.removesuffix(".weight"): s for n, s in held.items()},
    )


def write(form: str, model: Any, out: Path) -> tuple[Path, Deltas]:
    """The file of a LoRA in a form, and what it adds to each layer by hand."""
    _, part, slots, shapes = model
    source = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    deltas: Deltas = {}
    ranks, alphas = {}, {}
    places = slots if form.startswith("kohya") else {n: (n,) for own in slots.values() for n in own}
    for number, (place, layers) in enumerate(places.items()):
        rank, alpha = RANKS[number % 5], ALPHAS[number % 5]
        rows = [shapes[layer][0] for layer in layers]
        down = torch.randn(rank, shapes[layers[0]][1], generator=source)
        up = torch.randn(sum(rows), rank, generator=source)
        scale = 1.0 if "without" in form else alpha / rank
        for layer, added in zip(layers, (scale * up @ down).split(rows), strict=True):
            deltas[layer] = added
        stem = name_of(place) if form.startswith("kohya") else f"{part}.{place}"
        stem = f"base_model.model.{place}" if form == "peft" else stem
        a, b = ("lora_down", "lora_up") if form.startswith("kohya") else ("lora_A", "lora_B")
        tensors |= {f"{stem}.{a}.weight": down, f"{stem}.{b}.weight": up}
        if form in ("kohya", "dotted"):
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
        ranks[place], alphas[place] = rank, alpha
    settings = {"r": 4, "lora_alpha": 4.0, "target_modules": [*places],
                "rank_pattern": ranks, "alpha_pattern": alphas}  # fmt: skip
    header = None
    if form == "header":
        named = {f"{part}.{key}": value for key, value in settings.items()}
        header = {"lora_adapter_metadata": json.dumps(named)}
    out.mkdir()
    if form == "peft":
        (out / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "LORA"}))
    file = out / ("adapter_model.safetensors" if form == "peft" else "cat.safetensors")
    save_file(tensors, file, metadata=header)
    return file, deltas


def assert_deltas(model: torch.nn.Module, deltas: Deltas) -> None:
    """What the adapter of a model adds to each weight is what is added by hand."""
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    assert {*deltas} <= {*layers}
    apart = {}
    for name, expected in deltas.items():
        layer: Any = layers[name]
        found = layer.get_delta_weight(layer.active_adapters[0]).flatten(1)
        found = found if found.shape == expected.shape else found.T  # GPT-2's weights are so
        apart[name] = ((found - expected).norm() / expected.norm()).item()
    assert max(apart.values()) < 1e-6, {n: round(v, 2) for n, v in apart.items() if v > 1e-6}


@pytest.mark.parametrize(
    ("model", "form"),
    [*(("sdxl", form) for form in FORMS), *((one, "kohya") for one in SLOTS if one != "sdxl")],
    indirect=["model"],
)
def test_each_layer_is_read_with_its_own_scale(model: Any, tmp_path: Path, form: str) -> None:
    """What is added to a weight is alpha / rank * B @ A, without alpha B @ A."""
    file, deltas = write(form, model, tmp_path / "adapter")
    _, pipeline = open_pipeline(file.parent if form == "peft" else file, model[0], "cpu")
    assert_deltas(getattr(pipeline, model[1]), deltas)


def test_a_language_model_is_read_with_each_layers_own_scale(
    language: Language, tmp_path: Path
) -> None:
    """A folder of peft whose settings have patterns."""
    held = language.family.empty_model(language.base).state_dict()
    names = [n for n in held if n.endswith(tuple(f"{end}.weight" for end in LORA[language.name]))]
    shapes = {name.removesuffix(".weight"): held[name].shape for name in names}
    model = language.base, "", {name: (name,) for name in shapes}, shapes
    file, deltas = write("peft", model, tmp_path / "adapter")
    _, opened, _ = open_language_model(file.parent, language.base, "cpu")
    assert_deltas(opened, deltas)
