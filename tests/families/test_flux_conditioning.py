"""Flux with conditioning images, against the pipelines that its users load the weights with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from tests.builders.images import build_nano, draw_image, draw_of, make_pictures
from tests.families.promises import assert_same_call, first_call, predicted_call

from zerotrain.config.models import EvaluateConfig
from zerotrain.data.buckets import to_pixels
from zerotrain.models.families.flux import FAMILY
from zerotrain.models.families.flux_conditioning import encode_conditioning
from zerotrain.models.families.patches import pack, unpack

PROMPTS = ["a red house", "a blue house"]
VALUES = EvaluateConfig(num_inference_steps=2)
LATENTS = torch.Size([1, 4, 4, 4])


def build(folder: Path, pipeline: str) -> Path:
    """A nano model of this class for 16 px images, its autoencoder fitted for a few steps."""
    return build_nano("flux", folder, pipeline=pipeline)


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano FLUX.1 Kontext."""
    return build(tmp_path_factory.mktemp("kontext") / "base", "FluxKontextPipeline")


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano FLUX.1 Fill."""
    return build(tmp_path_factory.mktemp("fill") / "base", "FluxFillPipeline")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """FluxFillPipeline takes the posterior's mode, where it draws a sample."""
    monkeypatch.setattr(
        DiagonalGaussianDistribution, "sample", lambda posterior, generator=None: posterior.mode()
    )


def mask(side: int = 16) -> Image.Image:
    """White, which is to be filled, in the right half; grey that is nearly so below it."""
    levels = np.zeros((side, side), dtype=np.uint8)
    levels[:, side // 2 :], levels[side // 2 :, side // 4 :] = 255, 127
    levels[-2:] = 128
    return Image.fromarray(levels)


def pixels_of(*images: Image.Image) -> torch.Tensor:
    """Conditioning images of one sample as training reads them, [1, n, 3, H, W]."""
    return torch.stack([torch.from_numpy(to_pixels(image.convert("RGB"))) for image in images])[
        None
    ]


def by_hand(
    pipeline: DiffusionPipeline, prompt: str = PROMPTS[0], seed: int = 7, **arguments: Any
) -> bytes:
    """Pixels of the 16 px image that a user's own call draws."""
    if isinstance(pipeline, FluxKontextPipeline):
        arguments |= {"max_area": 256, "_auto_resize": False}
    return draw_image(pipeline, prompt, seed, max_sequence_length=32, **arguments)


def predicted(
    folder: Path, pipeline: DiffusionPipeline, expected: dict[str, Any], pixels: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """What the model is called with by predict, and the packed velocity that predict gives."""
    channels = 4 * LATENTS[1]
    noisy = expected["hidden_states"][:, :4, :channels]
    batch = {
        "prompt_embeds": expected["encoder_hidden_states"],
        "pooled_prompt_embeds": expected["pooled_projections"],
        **FAMILY.load_encoders(folder, "cpu").encode_conditioning(pixels),
    }
    latents, timesteps = unpack(noisy, LATENTS), 1000 * expected["timestep"]
    return predicted_call(FAMILY, folder, pipeline.transformer, latents, timesteps, batch)


@pytest.mark.parametrize("name", ["FluxKontextPipeline", "FluxFillPipeline"])
def test_the_nano_model_is_one_that_diffusers_loads(name, kontext, fill):
    """By the class that model_index.json names, with the parts of the family."""
    folder = kontext if name == "FluxKontextPipeline" else fill
    assert type(DiffusionPipeline.from_pretrained(folder)).__name__ == name
    assert {path.name for path in folder.iterdir()} == {*FAMILY.spec.parts, "model_index.json"}


def test_kontext_is_the_same_model_as_the_plain_one(kontext, tmp_path):
    """Equal seeds give equal parts: model_index.json alone differs."""
    build(tmp_path, "FluxPipeline")
    for path in tmp_path.rglob("*.*"):
        same = path.read_bytes() == (kontext / path.relative_to(tmp_path)).read_bytes()
        assert same == (path.name != "model_index.json"), path


def test_the_model_is_called_as_kontext_calls_it(kontext):
    """Every argument of the first step with a conditioning image, and the velocity."""
    image = make_pictures(16, 2)[1]
    pipeline = FluxKontextPipeline.from_pretrained(kontext)
    expected, answer = first_call(pipeline.transformer, lambda: by_hand(pipeline, image=image))
    found, velocity = predicted(kontext, pipeline, expected, pixels_of(image))
    assert_same_call(found, expected)
    assert found["hidden_states"].shape == (1, 8, 16)
    torch.testing.assert_close(velocity, answer[:, :4], rtol=1e-6, atol=1e-6)


def test_tokens_of_several_images_follow_one_another(kontext):
    """All have 1 in the first axis, rows and columns begin at 0 with each: so their order is of no
    effect, while what they show is."""
    pipeline = FluxKontextPipeline.from_pretrained(kontext)
    first, second = make_pictures(16, 2)
    given, _ = first_call(pipeline.transformer, lambda: by_hand(pipeline))
    latents = [
        FluxPipeline._pack_latents(
            FAMILY.load_encoders(kontext, "cpu").encode_images(pixels_of(image)[0]), 1, 4, 4, 4
        )
        for image in (first, second)
    ]
    own = given["img_ids"]
    assert own.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    ids = torch.cat([own, *[own + torch.tensor([1.0, 0, 0])] * 2])
    with torch.inference_mode():
        expected = pipeline.transformer(
            **{
                **given,
                "hidden_states": torch.cat([given["hidden_states"], *latents], dim=1),
                "img_ids": ids,
            }
        )[0][:, :4]
    found, velocity = predicted(kontext, pipeline, given, pixels_of(first, second))
    assert torch.equal(found["img_ids"], ids)
    torch.testing.assert_close(velocity, expected, rtol=1e-6, atol=1e-6)
    _, other = predicted(kontext, pipeline, given, pixels_of(second, first))
    torch.testing.assert_close(other, velocity, rtol=1e-5, atol=1e-5)
    _, other = predicted(kontext, pipeline, given, pixels_of(first, first))
    assert (other - velocity).abs().max() > 1e-4


def test_the_model_is_called_as_fill_calls_it(fill, modes):
    """Every argument of the first step with an image and its mask, and the velocity."""
    image = make_pictures(16, 2)[1]
    pipeline = FluxFillPipeline.from_pretrained(fill)
    expected, answer = first_call(
        pipeline.transformer, lambda: by_hand(pipeline, image=image, mask_image=mask())
    )
    found, velocity = predicted(fill, pipeline, expected, pixels_of(image, mask()))
    assert_same_call(found, expected)
    assert found["hidden_states"].shape == (1, 4, 16 + 16 + 64)
    torch.testing.assert_close(velocity, answer, rtol=1e-6, atol=1e-6)


def test_a_masked_image_is_encoded_as_the_pipeline_prepares_it(fill, modes):
    """Grey where the mask is 128 or lighter, and the mask's own pixels, also of a batch."""
    pipeline = FluxFillPipeline.from_pretrained(fill)
    images = make_pictures(16, 2)
    masks = [mask(), mask().rotate(90)]
    expected = []
    for image, white in zip(images, masks, strict=True):
        levels = pipeline.mask_processor.preprocess(white, height=16, width=16)
        shown = pipeline.image_processor.preprocess(image, height=16, width=16) * (1 - levels)
        with torch.inference_mode():
            cells, latents = pipeline.prepare_mask_latents(
                levels, shown, 1, 4, 1, 16, 16, torch.float32, "cpu", None
            )
        expected.append(torch.cat([latents, cells], dim=-1))
    pixels = torch.cat([pixels_of(*pair) for pair in zip(images, masks, strict=True)])
    found = FAMILY.load_encoders(fill, "cpu").encode_conditioning(pixels)
    assert list(found) == ["fill_condition"]
    assert found["fill_condition"].shape == (2, 4 + 16, 4, 4)
    torch.testing.assert_close(pack(found["fill_condition"]), torch.cat(expected))


def test_a_coloured_mask_has_pillows_luminance() -> None:
    """Whatever the colour: what Pillow makes L of 128 or more is to be filled."""
    draw = np.random.default_rng(0)
    colours = Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    found = encode_conditioning(
        lambda pixels: pixels[:, :1], pixels_of(Image.new("RGB", (64, 64), "white"), colours),
        fill=True,
    )["fill_condition"]  # fmt: skip
    white = torch.from_numpy(np.asarray(colours.convert("L")) >= 128).float()
    assert torch.equal(found[0, 1], white)
    assert torch.equal(found[0, 0], 1 - white)


def test_latents_of_conditioning_images_are_those_of_images(kontext):
    images = make_pictures(16, 3)
    encoders = FAMILY.load_encoders(kontext, "cpu")
    found = encoders.encode_conditioning(pixels_of(*images))
    assert list(found) == ["conditioning_latents"]
    expected = torch.stack([encoders.encode_images(pixels_of(one)[0]) for one in images], dim=1)
    assert torch.equal(found["conditioning_latents"], expected)


@pytest.mark.parametrize("name", ["kontext", "fill"])
def test_the_loss_is_over_the_image_alone(name, request):
    """Conditioning images are no target, and the loss depends on what they show."""
    folder = request.getfixturevalue(name)
    encoders = FAMILY.load_encoders(folder, "cpu")
    images = make_pictures(16, 3)
    latents = encoders.encode_images(pixels_of(images[0])[0])
    source = torch.Generator().manual_seed(0)
    batch = {
        "latents": latents,
        "noise": torch.randn(latents.shape, generator=source),
        "uniform": torch.tensor([0.3], dtype=torch.float64),
        **encoders.encode_prompts(PROMPTS[:1]),
    }
    conditioning = encoders.encode_conditioning(pixels_of(*images[1:]))
    [tensor] = conditioning.values()
    tensor.requires_grad_()
    model = FAMILY.load_model(folder).requires_grad_(False)
    objective = FAMILY.objective(folder)
    loss = objective.loss(model, batch | conditioning)
    assert loss.shape == (1,)
    loss.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.abs().max() > 0
    sigma = objective.sigmas(batch["uniform"], latents)
    noisy = (1 - sigma) * latents + sigma * batch["noise"]
    velocity = objective.predict(model, noisy, 1000 * sigma, batch | conditioning)
    assert velocity.shape == latents.shape
    expected = (velocity - (batch["noise"] - latents)).square().mean()
    torch.testing.assert_close(loss[0], expected)


@pytest.mark.parametrize(("name", "size"), [("kontext", (24, 16)), ("fill", (16, 24))])
def test_a_batch_of_a_bucket_has_the_losses_of_its_samples(name, size, request):
    """And the latents: both images of both samples have the size of their bucket."""
    folder = request.getfixturevalue(name)
    encoders = FAMILY.load_encoders(folder, "cpu")
    images = [image.resize(size) for image in make_pictures(16, 6)]
    latents = encoders.encode_images(pixels_of(*images[:2])[0])
    source = torch.Generator().manual_seed(0)
    batch = {
        "latents": latents,
        "noise": torch.randn(latents.shape, generator=source),
        "uniform": torch.tensor([0.3, 0.6], dtype=torch.float64),
        **encoders.encode_prompts(PROMPTS),
        **encoders.encode_conditioning(torch.cat([pixels_of(*images[i : i + 2]) for i in (2, 4)])),
    }
    model, objective = FAMILY.load_model(folder), FAMILY.objective(folder)
    with torch.inference_mode():
        together = objective.loss(model, batch)
        for row in range(2):
            own = slice(row, row + 1)
            alone = {key: tensor[own] for key, tensor in batch.items()}
            alone |= encoders.encode_conditioning(pixels_of(*images[2 * row + 2 : 2 * row + 4]))
            torch.testing.assert_close(objective.loss(model, alone), together[own])


def test_index_names_no_image_encoder(kontext, fill):
    """Kontext may have one for other uses and has none; Fill knows of none."""
    index = json.loads((kontext / "model_index.json").read_text())
    assert index["image_encoder"] == index["feature_extractor"] == [None, None]
    assert "image_encoder" not in json.loads((fill / "model_index.json").read_text())


def drawn(
    folder: Path, images: list[list[Image.Image]], seeds: tuple[int, ...] = (7,), **changes: object
) -> list[bytes]:
    """Pixels of the 16 px images that `sample` draws of the prompts."""
    config = EvaluateConfig.model_validate({"num_inference_steps": 2, **changes})
    made = draw_of(
        FAMILY, folder, PROMPTS[: len(seeds)], seeds, config, resolution=16, device="cpu",
        conditioning=images,
    )  # fmt: skip
    return [image.tobytes() for image in made]


def test_samples_of_kontext_are_the_pipelines_own(kontext):
    """Each prompt with its own image; guided by the empty prompt with that image; without one."""
    pipeline = FluxKontextPipeline.from_pretrained(kontext)
    images = make_pictures(16, 2)
    own = [
        by_hand(pipeline, prompt, seed, image=image)
        for prompt, seed, image in zip(PROMPTS, (7, 8), images, strict=True)
    ]
    assert drawn(kontext, [[image] for image in images], (7, 8)) == own
    guided = by_hand(pipeline, image=images[0], true_cfg_scale=3.0, negative_prompt="")
    assert drawn(kontext, [images[:1]], guidance_scale=3.0) == [guided]
    [alone] = draw_of(FAMILY, kontext, PROMPTS[:1], [7], VALUES, resolution=16, device="cpu")
    assert alone.tobytes() == by_hand(pipeline)
    assert len({*own, guided, alone.tobytes()}) == 4


def test_a_plain_base_reads_images_as_kontext_does(kontext, tmp_path):
    """A LoRA of FLUX.1 dev may be trained in context: the model is the same, and so its images."""
    plain = build(tmp_path / "base", "FluxPipeline")
    image = make_pictures(16, 1)[0]
    assert drawn(plain, [[image]]) == drawn(kontext, [[image]])


def test_sampling_calls_the_model_as_training_does(kontext):
    """With two images, of any size: every argument of the first step."""
    images = [make_pictures(32, 1)[0], make_pictures(16, 2)[1]]
    pipeline = FAMILY.load_pipeline(kontext, "cpu")
    given, _ = first_call(
        pipeline.transformer,
        lambda: FAMILY.draw(
            pipeline, PROMPTS[:1], [7], VALUES, resolution=16, conditioning=[images]
        ),
    )
    assert given["hidden_states"].shape == (1, 12, 16)
    scaled = images[0].resize((16, 16), Image.Resampling.LANCZOS)
    found, _ = predicted(kontext, pipeline, given, pixels_of(scaled, images[1]))
    assert_same_call(found, given)


def test_samples_of_fill_are_the_pipelines_own(fill, modes):
    """With an image and its mask."""
    pipeline = FluxFillPipeline.from_pretrained(fill)
    image = make_pictures(16, 1)[0]
    own = by_hand(pipeline, image=image, mask_image=mask())
    assert drawn(fill, [[image, mask().convert("RGB")]]) == [own]
    assert drawn(fill, [[image, Image.new("RGB", (16, 16), "white")]]) != [own]


def test_a_distilled_fill_gets_its_pipelines_guidance(fill, tmp_path, modes):
    """30 if none is set, as diffusers has it for FLUX.1 Fill."""
    shutil.copytree(fill, tmp_path / "base")
    config = {**FAMILY.load_model(fill).config, "guidance_embeds": True}
    torch.manual_seed(0)
    FluxTransformer2DModel.from_config(config).save_pretrained(tmp_path / "base" / "transformer")
    pipeline = FluxFillPipeline.from_pretrained(tmp_path / "base")
    image = make_pictures(16, 1)[0]
    given = {"image": image, "mask_image": mask()}
    images = [[image, mask().convert("RGB")]]
    assert drawn(tmp_path / "base", images) == [by_hand(pipeline, **given)]
    told = by_hand(pipeline, **given, guidance_scale=4.0)
    assert drawn(tmp_path / "base", images, guidance_scale=4.0) == [told]
    assert told != by_hand(pipeline, **given)


@pytest.mark.parametrize("name", ["kontext", "fill"])
def test_latents_while_training_are_those_of_the_images_after_it(name, request):
    """`sample_latents` with what the cache holds, against `sample` with the images."""
    folder = request.getfixturevalue(name)
    images = [make_pictures(16, 1)[0], mask().convert("RGB")]
    encoders = FAMILY.load_encoders(folder, "cpu")
    embeds, empty = (encoders.encode_prompts([prompt]) for prompt in (PROMPTS[0], ""))
    pipeline = FAMILY.live_pipeline(
        folder, FAMILY.load_model(folder).eval(), 16, LATENTS[1:], VALUES, conditioned=True
    )
    latents = FAMILY.sample_latents(
        pipeline, embeds, empty, 7, VALUES, resolution=16, shape=LATENTS[1:],
        conditioning=encoders.encode_conditioning(pixels_of(*images)),
    )  # fmt: skip
    [made] = FAMILY.decode_latents(folder, latents[None], "cpu")
    [expected] = drawn(folder, [images])
    assert np.abs(np.asarray(made).astype(int).ravel() - list(expected)).max() <= 1


@pytest.fixture
def flex(kontext: Path, tmp_path: Path) -> Path:
    """The same with the transformer of FLEX.2: further channels, and given the guidance."""
    folder = tmp_path / "flex"
    shutil.copytree(kontext, folder)
    torch.manual_seed(0)
    config = {**FAMILY.load_model(kontext).config, "guidance_embeds": True}
    config |= {"in_channels": 4 * (4 + 4 + 1 + 4), "out_channels": 16}
    FluxTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    return folder


def test_flex_is_given_no_images_and_a_mask_of_ones(flex):
    """Beside noisy latents: a masked image of zeros, a mask of ones, a control image of zeros, as
    DiffSynth-Studio trains it."""
    model = FAMILY.load_model(flex)
    noisy = torch.randn(LATENTS, generator=torch.Generator().manual_seed(0))
    batch = dict(FAMILY.load_encoders(flex, "cpu").encode_prompts(PROMPTS[:1]))
    none, ones = torch.zeros_like(noisy), torch.ones_like(noisy[:, :1])
    objective = FAMILY.objective(flex, {"flux_guidance_value": 2.0})
    timesteps = torch.tensor([500.0])

    with torch.no_grad():
        given, answer = first_call(model, lambda: objective.predict(model, noisy, timesteps, batch))
        velocity = objective.predict(model, noisy, timesteps, batch)
    expected = pack(torch.cat([noisy, none, ones, none], dim=1))
    assert torch.equal(given["hidden_states"], expected)
    assert given["guidance"].tolist() == [2.0]
    assert torch.equal(velocity, unpack(answer, LATENTS))


def test_samples_of_flex_are_drawn_with_the_same_channels(flex):
    """Sampling gives the model what training does, while it trains as well."""
    pipeline = FAMILY.load_pipeline(flex, "cpu")
    embeds, empty = (FAMILY.load_encoders(flex, "cpu").encode_prompts([p]) for p in ("a", ""))
    live = FAMILY.live_pipeline(flex, pipeline.transformer, 16, LATENTS[1:], VALUES)
    calls = [
        first_call(pipeline.transformer, call)[0]["hidden_states"]
        for call in (
            lambda: FAMILY.draw(pipeline, ["a"], [7], VALUES, resolution=16),
            lambda: FAMILY.sample_latents(
                live, embeds, empty, 7, VALUES, resolution=16, shape=LATENTS[1:]
            ),
        )
    ]
    noise = torch.randn(LATENTS, generator=torch.Generator().manual_seed(7))
    none, ones = torch.zeros_like(noise), torch.ones_like(noise[:, :1])
    expected = pack(torch.cat([noise, none, ones, none], dim=1))
    assert torch.equal(calls[0], expected)
    assert torch.equal(calls[1], expected)
