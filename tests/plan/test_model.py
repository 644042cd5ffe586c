"""Models on the meta device: the counts that config/models states, and what is trained."""

from __future__ import annotations

import math

import pytest
from tests.builders.images import build_nano
from tests.plan.conftest import shipped_models

from zerotrain.config.families import FAMILIES, PRESETS
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.activations import trace_activations
from zerotrain.launch.planner.architecture import (
    Part,
    find_architecture,
    read_shipped,
)
from zerotrain.launch.planner.model import build_part, trained_model
from zerotrain.launch.planner.shape import Shape, text_tokens
from zerotrain.launch.planner.storage import parameters_of
from zerotrain.models.families import load_family
from zerotrain.models.sizes import model_sizes

PARTS = [
    pytest.param(part, id=f"{known.source.split(', ')[0]}-{name}")
    for known in read_shipped()
    for name, part in known.parts.items()
]


@pytest.mark.parametrize("part", PARTS)
def test_stated_counts_are_those_of_the_real_classes(part):
    built = build_part(part, "test")
    assert sum(p.numel() for p in built.parameters()) == part.parameters
    assert all(p.is_meta for p in built.parameters())


def test_an_adapter_alone_is_trained_of_a_model_of_20_billion_parameters():
    architecture = find_architecture("qwen_image", "Qwen/Qwen-Image")
    lora = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "target_modules": ["to_q", "to_out.0"]}
    model = trained_model(architecture, lora)
    # 60 blocks, two layers, two factors of 16 x 3072
    assert model.trained_parameters == 60 * 2 * 2 * 16 * 3072
    assert model.parameters == architecture.trained.parameters + model.trained_parameters
    assert all(".lora_" in name for name in model.trained)


@pytest.mark.parametrize(
    ("family", "base", "targets"),
    [
        *((family, "nano", targets) for family in FAMILIES for targets in (None, "all-linear")),
        *(
            pytest.param(*one.values, marks=[*one.marks, pytest.mark.slow])
            for one in shipped_models("all-linear")
        ),
    ],
)
def test_a_lora_has_the_parameters_that_its_names_promise(family, base, targets):
    """render_launch counts by the names in a file's header; training asks the model's layers."""
    architecture = find_architecture(family, base)
    lora = {"rank": 4, "alpha": 4.0, "dropout": 0.0, "target_modules": targets}
    counted = model_sizes(trained_model(architecture).shapes, lora)
    assert counted.trained == trained_model(architecture, lora).trained_parameters


@pytest.mark.parametrize(
    ("family", "peft"),
    [
        ("sdxl", {"peft_type": "LOHA", "r": 2, "target_modules": ["to_q", "conv1"]}),
        ("sdxl", {"peft_type": "FOURIERFT", "n_frequency": 20}),
        ("causal_lm", {"peft_type": "LOKR", "r": 2}),
    ],
)
def test_adapters_of_other_methods_are_counted_and_traced(family, peft):
    """Their passes run without values; an adapter's effect on memory is in the trace."""
    architecture = find_architecture(family, "nano")
    model = trained_model(architecture, peft)
    plain = trained_model(architecture)
    assert model.parameters == plain.parameters + model.trained_parameters
    assert 0 < model.trained_parameters < plain.parameters / 10
    shape = Shape(batch=1, resolution=64, tokens=None if family == "sdxl" else 32)
    settings = {"mixed_precision": "no", "autocast": False, "device": "cpu"}
    assert trace_activations(model, shape, **settings).peak > 0


def test_trainable_parameters_alone_are_trained():
    architecture = find_architecture("sdxl", "nano")
    model = trained_model(architecture, None, ["bias$"], [r"attn2\.", "^conv_in"])
    assert {name.split(".")[0] for name in model.trained} >= {"conv_in", "down_blocks"}
    assert all("attn2." in n or n.startswith("conv_in") for n in model.trained)
    assert not any(name.endswith("bias") for name in model.trained)
    shapes = {name: list(shape) for name, shape in model.shapes.items()}
    sizes = model_sizes(shapes, None, ["bias$"], [r"attn2\.", "^conv_in"])
    assert sizes.trained == model.trained_parameters


def test_frozen_parameters_are_not_trained():
    model = trained_model(find_architecture("sdxl", "nano"), None, ["^down_blocks"])
    assert model.trained
    assert not any(name.startswith("down_blocks") for name in model.trained)
    assert model.trained_parameters < model.parameters


@pytest.mark.parametrize(
    ("precision", "tables", "least", "most"),
    [("nf4", 3 * 1024, 0.5, 0.54), ("int8-quanto", 0, 1.0, 1.07), ("int2-quanto", 0, 0.25, 0.4)],
)
def test_quantized_weights_have_the_bytes_of_a_training(
    precision: str, tables: int, least: float, most: float
) -> None:
    """And are still parameters of the model, under the names that they had."""
    architecture = find_architecture("qwen_image", "nano")
    lora = {"rank": 2, "alpha": 2.0, "dropout": 0.0, "target_modules": ["to_q"]}
    plain, packed = (
        trained_model(architecture, lora, precision=given, exclude=["img_in"])
        for given in ("no_change", precision)
    )
    renamed = {name.replace(".base_layer.", "."): shape for name, shape in plain.shapes.items()}
    assert {n.replace(".base_layer.", "."): s for n, s in packed.shapes.items()} == renamed
    assert packed.trained == plain.trained
    assert "img_in.weight" not in packed.quantized
    weights = sum(math.prod(packed.shapes[name]) for name in packed.quantized)
    rest = sum(packed.quantized.values()) - tables * len(packed.quantized)
    assert least < rest / weights < most


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("sdxl", {"text_encoder", "text_encoder_2", "vae"}),
        ("sd3", {"text_encoder", "text_encoder_2", "text_encoder_3", "vae"}),
        ("flux", {"text_encoder", "text_encoder_2", "vae"}),
        ("qwen_image", {"text_encoder", "vae"}),
    ],
)
def test_nano_is_what_the_family_builds(family, expected, tmp_path):
    model = trained_model(find_architecture(family, "nano"))
    build_nano(family, tmp_path, steps=1)
    built = load_family(family).load_model(tmp_path)
    assert model.shapes == {n: tuple(p.shape) for n, p in built.named_parameters()}
    encoders = model.architecture.encoders
    assert set(encoders) == expected
    assert all(parameters_of(part, "nano") > 1000 for part in encoders.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_has_ten_times_the_parameters_of_nano(family):
    """About; its encoders are larger, too, but for the autoencoder, which is the same."""
    nano, micro = (find_architecture(family, preset) for preset in PRESETS)
    ratio = parameters_of(micro.trained, "micro") / parameters_of(nano.trained, "nano")
    print(f"{family}: {ratio:.1f}")
    assert 8 < ratio < 12
    assert nano.encoders.get("vae") == micro.encoders.get("vae")
    for name in nano.encoders.keys() - {"vae"}:
        assert parameters_of(micro.encoders[name], "") > 2 * parameters_of(nano.encoders[name], "")


@pytest.mark.parametrize(
    "part",
    [
        Part("diffusers", "NoSuchModel", {}),
        Part("transformers", "Qwen2ForCausalLM", {"hidden_size": "wide"}),
    ],
)
def test_a_part_that_cannot_be_built_is_named(part):
    with pytest.raises(PipelineError, match=f"base: {part.library}'s {part.class_name} cannot be"):
        build_part(part, "base")


@pytest.mark.parametrize(
    ("family", "base", "default", "asked"),
    [
        ("sdxl", "stabilityai/stable-diffusion-xl-base-1.0", 77, 77),
        ("sd3", "stabilityai/stable-diffusion-3-medium-diffusers", 77 + 256, 77 + 64),
        ("sd3", "nano", 32 + 256, 32 + 64),
        ("qwen_image", "Qwen/Qwen-Image", 512, 64),
    ],
)
def test_captions_are_as_long_as_the_configuration_says(family, base, default, asked):
    """cache.max_sequence_length is T5's or Qwen's; CLIP has its own."""
    known = find_architecture(family, base)
    assert text_tokens(known, Shape(1)) == default
    assert text_tokens(known, Shape(1, max_sequence_length=64)) == asked
    assert text_tokens(known, Shape(1, tokens=5, max_sequence_length=64)) == 5
