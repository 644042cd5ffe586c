"""Adapters: what is trained is what diffusers loads."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors import safe_open
from tests.builders.adapters import (
    ATTENTION,
    SETTINGS,
    adapter_of,
    difference,
    make_adapted,
    predict,
    write_adapter,
)
from tests.builders.images import draw_house, draw_of

from zerotrain.config.models import EvaluateConfig
from zerotrain.config.trained_part import LoraConfig
from zerotrain.errors import PipelineError
from zerotrain.models.adapter_config import METADATA
from zerotrain.models.families.lora import ADAPTER, add_adapter, save_adapter
from zerotrain.models.families.sdxl import FAMILY
from zerotrain.models.sizes import model_sizes

# The first of these names comes before those of the attention layers, and one is a convolution.
MIXED = ("proj_in", "to_q", "ff.net.2", "conv1")


def weights_folder(base: Path, folder: Path, **changes: object) -> Path:
    """A whole pipeline with an adapter next to it, as a LoRA run exports it."""
    shutil.copytree(base, folder)
    write_adapter(base, make_adapted(base), folder, **changes)
    return folder


def test_an_adapter_alone_is_trained_and_begins_without_effect(nano):
    """Only float32 factors of the named layers require a gradient; the output is the base's."""
    unet = make_adapted(nano, trained=False)
    trained = adapter_of(unet)
    layers = {name.split(".lora_")[0] for name in trained}
    assert layers == {
        name.removesuffix(".base_layer")
        for name, module in unet.named_modules()
        if name.endswith(tuple(f".{target}.base_layer" for target in ATTENTION))
    }
    assert len(layers) == 4 * 2 * 4  # four transformer blocks, two attentions, four targets
    for layer in layers:
        first = trained[f"{layer}.lora_A.default.weight"]
        second = trained[f"{layer}.lora_B.default.weight"]
        weight = unet.get_parameter(f"{layer}.base_layer.weight")
        assert (first.shape, second.shape) == ((4, weight.shape[1]), (weight.shape[0], 4))
        assert first.abs().min() >= 0 < first.abs().max()
        assert not second.any()
    assert len(trained) == 2 * len(layers)
    assert difference(unet, FAMILY.load_model(nano).eval()) == 0.0


def test_a_base_of_half_precision_gets_an_adapter_of_float32(nano):
    unet = FAMILY.load_model(nano).bfloat16()
    add_adapter(unet, seed=0, **SETTINGS)
    assert {p.dtype for p in unet.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in unet.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_the_adapters_start_follows_from_the_seed_alone(nano):
    """Whatever the global generator was before; and that is left as it was."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = adapter_of(make_adapted(nano, seed=3, trained=False))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second = adapter_of(make_adapted(nano, seed=3, trained=False))
    other = adapter_of(make_adapted(nano, seed=4, trained=False))
    assert list(first) == list(second) == list(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


@pytest.mark.parametrize(
    ("target", "message", "near"),
    [
        ("to_qq", "no layer of UNet2DConditionModel has a name that ends in 'to_qq'", "to_q"),
        ("out.0", "no layer of UNet2DConditionModel has a name that ends in 'out.0'", "to_out.0"),
        ("attn1", "'attn1' names Attention in UNet2DConditionModel, no linear or", "near names"),
    ],
)
def test_a_target_that_names_no_layer_is_refused(nano, target, message, near):
    """peft alone would leave it out without a word as long as another target fits."""
    with pytest.raises(PipelineError) as refused:
        make_adapted(nano, target_modules=("to_k", target))
    assert message in refused.value.what
    assert near in refused.value.hint


def test_gradient_checkpointing_changes_no_gradient(nano):
    """Although no input of a checkpointed block requires a gradient; dropout draws the same."""
    gradients = []
    for checkpointing in (False, True):
        unet = make_adapted(nano, dropout=0.5)
        if checkpointing:
            unet.enable_gradient_checkpointing()
        unet.train()
        torch.manual_seed(0)
        predict(unet).square().mean().backward()
        gradients.append({name: p.grad for name, p in adapter_of(unet).items()})
    plain, checkpointed = gradients
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_the_pipeline_loads_the_adapter_that_was_trained(nano, tmp_path):
    """alpha is not rank: output equal to the trained model's, far from the base's.

    Layers of several kinds are all loaded, and the training's dropout no longer acts.
    """
    changes = {"target_modules": MIXED, "dropout": 0.5}
    unet = make_adapted(nano, **changes)
    write_adapter(nano, unet, tmp_path, **changes)
    pipeline = StableDiffusionXLPipeline.from_pretrained(nano, add_watermarker=False)
    effect = difference(pipeline.unet, unet)
    pipeline.load_lora_weights(tmp_path)
    assert difference(pipeline.unet, unet) <= 1e-6
    assert effect > 0.01


def test_the_file_is_the_same_from_the_same_adapter(nano, tmp_path):
    """Byte for byte, with rank and alpha in its header; its sha256 is returned."""
    unet = make_adapted(nano)
    found = {write_adapter(nano, unet, tmp_path / str(n))[ADAPTER] for n in range(3)}
    assert found == {hashlib.sha256((tmp_path / "0" / ADAPTER).read_bytes()).hexdigest()}
    assert [path.name for path in (tmp_path / "0").iterdir()] == [ADAPTER]
    with safe_open(tmp_path / "0" / ADAPTER, "pt") as file:
        header = json.loads(file.metadata()[METADATA])
        names = set(file.keys())
    assert (header["unet.r"], header["unet.lora_alpha"]) == (4, 8.0)
    assert names == {f"unet.{name.replace('.default.', '.')}" for name in adapter_of(unet)}


def test_a_weights_folder_is_sampled_and_measured_with_its_adapter(nano, tmp_path):
    """As a user who loads the folder's pipeline and its adapter sees it; the base stays as is."""
    folder = weights_folder(nano, tmp_path / "weights", dropout=0.5)
    unet = make_adapted(nano)
    assert difference(FAMILY.load_trained(folder), unet) <= 1e-6
    assert not FAMILY.load_trained(folder).training
    assert difference(FAMILY.load_model(folder).eval(), unet) > 0.01
    config = EvaluateConfig(num_inference_steps=2, guidance_scale=3.0)
    images = [
        draw_of(FAMILY, path, ["a red house"], [7], config, resolution=16, device="cpu")[0]
        for path in (folder, nano)
    ]
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder, add_watermarker=False)
    pipeline.load_lora_weights(folder)
    assert images[0].tobytes() == draw_house(pipeline) != images[1].tobytes()


def test_a_folder_without_an_adapter_is_loaded_as_it_is(nano):
    trained, plain = FAMILY.load_trained(nano), FAMILY.load_model(nano)
    assert trained.state_dict().keys() == plain.state_dict().keys()
    assert difference(trained, plain.eval()) == 0.0


def test_encoders_do_not_look_at_the_adapter(nano, tmp_path):
    """A weights folder can be the base of another run."""
    folder = weights_folder(nano, tmp_path / "weights")
    embeds, expected = (
        FAMILY.load_encoders(path, "cpu").encode_prompts(["a red house"]) for path in (folder, nano)
    )
    assert all(torch.equal(embeds[name], expected[name]) for name in expected)


def test_an_adapter_of_half_precision_is_the_trained_one_rounded(nano, tmp_path):
    """Both ways of loading it agree, and stay near the trained model."""
    folder = weights_folder(nano, tmp_path / "weights", dtype=torch.bfloat16)
    with safe_open(folder / ADAPTER, "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    trained = FAMILY.load_trained(folder)
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder, add_watermarker=False)
    pipeline.load_lora_weights(folder)
    assert difference(pipeline.unet, trained) <= 1e-6
    assert 0 < difference(trained, make_adapted(nano)) < 0.02


def refused(
    base: Path,
    tensors: dict[str, torch.Tensor],
    out: Path,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> str:
    """What save_adapter says of wrong tensors; it writes nothing."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    with pytest.raises(PipelineError) as error:
        save_adapter(
            FAMILY, base, shapes, tensors.__getitem__, SETTINGS | changes, dtype=dtype,
            out=out / "out",
        )  # fmt: skip
    assert not (out / "out").exists()
    return error.value.what


def test_an_empty_adapter_is_refused(nano, tmp_path):
    assert "the adapter is empty" in refused(nano, {}, tmp_path)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32), ({"use_dora": True}, torch.bfloat16),
        ({"init_lora_weights": "orthogonal"}, torch.float16),
    ],
    ids=str,
)  # fmt: skip
def test_an_adapter_is_written_once_a_step_has_trained_it(nano, tmp_path, options, dtype):
    """A change of 1e-6 of one factor counts; both factors of orthogonal are large before that."""
    unet = make_adapted(nano, trained=False, **options)
    untouched = adapter_of(unet)
    said = refused(nano, untouched, tmp_path, dtype=dtype, **options)
    first = next(name for name in untouched if ".lora_B." in name)
    assert f"the adapter does nothing: the product of {first} and its first factor" in said
    assert f"are zero in {dtype}" in said
    source = torch.Generator().manual_seed(0)
    step = 1e-6 * torch.randn(untouched[first].shape, generator=source)
    untouched[first].data += step
    assert write_adapter(nano, unet, tmp_path, dtype=dtype, **options).keys() == {ADAPTER}


def test_tensors_of_another_adapter_are_refused_by_name(nano, tmp_path):
    tensors = dict(adapter_of(make_adapted(nano)))
    name = next(iter(tensors))
    wrong = tensors | {name: tensors[name][:2]}
    assert f"{name}: [2, 96] in the trained adapter, [4, 96] by" in refused(nano, wrong, tmp_path)
    foreign = tensors | {"conv_in.weight": torch.ones(1)}
    assert "conv_in.weight: [1] in the trained adapter, absent" in refused(nano, foreign, tmp_path)
    del tensors[name]
    assert f"{name}: absent in the trained adapter" in refused(nano, tensors, tmp_path)


def test_tensors_that_read_otherwise_than_announced_are_refused(nano, tmp_path):
    """A partitioned parameter that no process gathered has no elements: such files are 40 bytes."""
    shapes = {name: list(p.shape) for name, p in adapter_of(make_adapted(nano)).items()}
    with pytest.raises(PipelineError, match=r"lora_A\.default\.weight: \[0\] in the trained"):
        save_adapter(
            FAMILY, nano, shapes, lambda _: torch.ones(0), SETTINGS, dtype=torch.float32,
            out=tmp_path,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"use_dora": True, "init_lora_weights": "orthogonal"},
        {"target_modules": "all-linear", "init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_options_reach_what_diffusers_loads(nano, tmp_path, options):
    """The pipeline's own load_lora_weights answers as the trained adapter does; the option counts,
    and so do its parameters in the plan."""
    unet = make_adapted(nano, **options)
    plain = make_adapted(nano)
    assert difference(unet, plain) > 1e-4
    write_adapter(nano, unet, tmp_path, **options)
    pipeline = StableDiffusionXLPipeline.from_pretrained(nano, add_watermarker=False)
    pipeline.load_lora_weights(tmp_path)
    assert difference(pipeline.unet.eval(), unet) == 0.0
    shapes = {name: p.shape for name, p in FAMILY.load_model(nano).named_parameters()}
    counted = model_sizes(shapes, {**SETTINGS, **options}).trained
    assert counted == sum(p.numel() for p in adapter_of(unet).values())


def test_the_attentions_projections_are_the_default(nano):
    assert set(adapter_of(make_adapted(nano, target_modules=None))) == set(
        adapter_of(make_adapted(nano))
    )


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_4", "olora", "loftq"])
def test_an_initialisation_that_changes_the_base_is_refused(initial):
    with pytest.raises(ValueError, match=f"{initial} changes the base's own weights"):
        LoraConfig(init_lora_weights=initial)
