"""zerotrain sample: every format gives the same images, and what is missing is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.builders.images import draw_house
from tests.formats.commands import PROMPT, distance, run_sample, sample_images
from tests.formats.conftest import OF_ADAPTERS, OF_WHOLE, header, pipeline_of

from zerotrain.export.command import convert
from zerotrain.export.formats.single_file import FILE


@pytest.mark.parametrize("form", OF_WHOLE)
def test_a_whole_model_of_any_format_gives_the_pipelines_image(whole, base, tmp_path, form):
    """The pixels that a user's own call of the pipeline draws."""
    convert(whole, form, tmp_path / "out")
    words = ("--base", base) if form == "single_file" else ()
    assert sample_images(tmp_path / "out", tmp_path / "png", *words) == [
        draw_house(pipeline_of(whole))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["pipe.dit.", None])
def test_a_prefix_is_found(whole, lora, base, tmp_path, prefix):
    """Of a model and of an adapter in a single file."""
    expected = {
        "whole": sample_images(whole, tmp_path / "a"),
        "lora": sample_images(lora, tmp_path / "b"),
    }
    assert expected["whole"] != expected["lora"]
    for name, source in (("whole", whole), ("lora", lora)):
        convert(source, "single_file", tmp_path / name, prefix=prefix)
        file = tmp_path / name / "model.safetensors"
        assert sample_images(file, tmp_path / "png", "--base", base) == expected[name]


def test_a_lora_of_any_format_gives_the_same_image(lora, base, tmp_path):
    """That of the weights folder with its adapter; of merged weights to a grey level."""
    expected = sample_images(lora, tmp_path / "expected")
    assert distance(expected[0], sample_images(base, tmp_path / "base")[0]) > 10
    for form in OF_ADAPTERS:
        convert(lora, form, tmp_path / form)
        words = () if form == "merged" else ("--base", base)
        found = sample_images(tmp_path / form, tmp_path / f"{form}-png", *words)
        assert distance(found[0], expected[0]) <= (1 if form == "merged" else 0), form


@pytest.mark.slow
def test_an_image_is_a_function_of_its_seed(whole, tmp_path):
    """However many are made; files are named by prompt and seed."""
    three = sample_images(whole, tmp_path / "three", "-n", 3)
    assert len(set(three)) == 3
    assert sample_images(whole, tmp_path / "one") == three[:1]
    names = sorted(path.name for path in (tmp_path / "three").iterdir())
    assert names == [f"a-red-house-{seed}.png" for seed in (7, 8, 9)]
    assert Image.open(tmp_path / "three" / names[0]).size == (16, 16)
    assert len(sample_images(whole, tmp_path / "large", "--resolution", 32)[0]) == 3 * 32 * 32
    assert len(sample_images(whole, tmp_path / "wide", "--resolution", "32x16")[0]) == 3 * 32 * 16


def test_what_is_missing_is_named(lora, whole, base, tmp_path):
    convert(lora, "kohya", tmp_path / "kohya")
    file = tmp_path / "kohya" / "lora.safetensors"
    assert f"ERROR: {file}: is a part of a model" in run_sample(file, PROMPT)
    text = run_sample(file, PROMPT, "--base", tmp_path)
    assert f"--base: {tmp_path} has no model_index.json" in text
    assert "has an adapter of its own" in run_sample(file, PROMPT, "--base", lora)
    assert f"--base: {whole} is a whole model already" in run_sample(whole, PROMPT, "--base", base)
    assert "there is nothing" in run_sample(tmp_path / "nowhere", PROMPT)
    assert "holds 0 safetensors files" in run_sample(tmp_path, PROMPT)
    assert "-n: 0 is too small" in run_sample(whole, PROMPT, "-n", 0)
    (tmp_path / "text.txt").write_text("")
    assert "is no safetensors file" in run_sample(tmp_path / "text.txt", PROMPT)


def test_a_file_of_another_model_is_refused(whole, base, tmp_path):
    convert(whole, "single_file", tmp_path / "out")
    file = tmp_path / "other.safetensors"
    save_file({f"other{n}": t for n, t in load_file(tmp_path / "out" / FILE).items()}, file)
    text = run_sample(file, PROMPT, "--base", base)
    assert "belong to no format that is known here, or to another base" in text


LAYER = ("0.attn1.to_q.weight", "0.attn1.to_q.lora_B.weight", "0_attn1_to_q.lora_up.weight")
"""How tensors of one layer end in a file."""


def rewrite(file: Path, change: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    """Put what it gives in the place of each tensor of the layer, or nothing."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        for other in change(tensor) if name.endswith(LAYER) else [tensor]:
            tensors[name] = other
    save_file(tensors, file, metadata=header(file))
    (file.parent / "manifest.json").unlink()  # without it the folder is another program's


@pytest.mark.parametrize(
    ("of", "form", "change"),
    [
        ("whole", "single_file", lambda tensor: [torch.cat([tensor, tensor])]),
        ("whole", "single_file", lambda tensor: []),
        ("whole", "ldm", lambda tensor: [torch.cat([tensor, tensor])]),
        ("lora", "single_file", lambda tensor: [torch.cat([tensor, tensor])]),
        ("lora", "diffusers_lora", lambda tensor: [torch.cat([tensor, tensor])]),
        ("lora", "kohya", lambda tensor: [torch.cat([tensor, tensor])]),
        ("lora", "peft", lambda tensor: [torch.cat([tensor, tensor])]),
    ],
)
def test_a_file_that_does_not_fit_the_base_is_refused(request, base, tmp_path, of, form, change):
    """One of another width, or of which a part is left."""
    convert(request.getfixturevalue(of), form, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    rewrite(file, change)
    words = () if form == "ldm" else ("--base", base)
    assert f"ERROR: {file}: does not fit the base (" in run_sample(file, PROMPT, *words)


@pytest.mark.parametrize(
    ("pipeline", "count", "message"),
    [
        ("QwenImageEditPipeline", 0, "takes 1 conditioning image for each prompt, and none is"),
        ("QwenImageEditPipeline", 2, "takes 1 conditioning image for each prompt, and 2 are given"),
        ("QwenImageEditPlusPipeline", 0, "takes at least 1 conditioning image for each prompt"),
        (
            "FluxFillPipeline",
            1,
            "takes 2 conditioning images for each prompt, and 1 is given",
        ),
        ("StableDiffusionXLPipeline", 1, "has no input for conditioning images"),
    ],
)
def test_a_number_of_images_that_a_model_does_not_take_is_refused(
    tmp_path, pipeline, count, message
):
    """Before a model is loaded, by the class that model_index.json names."""
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{pipeline}"}}')
    Image.new("RGB", (16, 16)).save(tmp_path / "input.png")
    words = ["--image", tmp_path / "input.png"] * count
    text = run_sample(tmp_path, PROMPT, *words)
    assert f"ERROR: --image: {tmp_path}" in text
    assert pipeline in text
    assert message in text


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    for file, why in (("text.png", "not an image that Pillow can read"), ("0.png", "no such file")):
        assert f"ERROR: --image: {tmp_path / file}: {why}" in run_sample(
            tmp_path, PROMPT, "--image", tmp_path / file
        )


def test_a_side_that_no_model_makes_is_refused(whole):
    assert "--resolution: 33 is not a multiple of 8" in run_sample(
        whole, PROMPT, "--resolution", 33
    )
    assert "--resolution: '32x' is no size in pixels" in run_sample(
        whole, PROMPT, "--resolution", "32x"
    )
    assert "--guidance: -1.0 is too small" in run_sample(whole, PROMPT, "--guidance", -1)
