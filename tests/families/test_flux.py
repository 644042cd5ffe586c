"""The Flux family against the pipeline that its users load the weights with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from tests.builders.images import draw_image
from tests.families.promises import (
    assert_same_call,
    first_call,
    predicted_call,
    sample,
)

from zerotrain.errors import PipelineError
from zerotrain.models.families.flux import FAMILY
from zerotrain.models.families.patches import pack, unpack

PROMPTS = ["a red house", "a blue house"]


@pytest.fixture(scope="module")
def base(nano_flux: Path) -> Path:
    return nano_flux


@pytest.fixture(scope="module")
def distilled(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a transformer that is given the guidance, as FLUX.1 dev."""
    folder = tmp_path_factory.mktemp("flux-dev") / "base"
    shutil.copytree(base, folder)
    config = {**FAMILY.load_model(base).config, "guidance_embeds": True}
    torch.manual_seed(0)
    FluxTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    return folder


def pipeline_of(folder: Path) -> FluxPipeline:
    """The pipeline as a user loads it."""
    return FluxPipeline.from_pretrained(folder)


def draw(pipeline: FluxPipeline, seed: int, prompt: str = PROMPTS[0], **arguments: Any) -> bytes:
    return draw_image(pipeline, prompt, seed, max_sequence_length=32, **arguments)


@pytest.mark.parametrize("length", [None, 8])
def test_captions_are_encoded_as_the_pipeline_encodes_prompts(base, length):
    found = FAMILY.load_encoders(base, "cpu", length).encode_prompts(PROMPTS)
    with torch.inference_mode():
        embeds, pooled, _ = pipeline_of(base).encode_prompt(
            PROMPTS, max_sequence_length=length or 32
        )
    assert torch.equal(found["prompt_embeds"], embeds)
    assert torch.equal(found["pooled_prompt_embeds"], pooled)
    assert not torch.equal(embeds[0], embeds[1])


def test_patches_are_the_pipelines() -> None:
    """Packed as it packs, and back."""
    latents = torch.randn(2, 4, 6, 8)
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, 2, 4, 6, 8))
    assert torch.equal(unpack(pack(latents), latents.shape), latents)


def test_latents_of_an_odd_side_are_refused(base):
    with pytest.raises(PipelineError, match=r"20 pixels are 5 latents wide.*") as caught:
        FAMILY.load_encoders(base, "cpu").encode_images(torch.zeros(1, 3, 20, 20))
    assert "multiple of 8" in str(caught.value)


@pytest.mark.parametrize("kind", ["base", "distilled"])
def test_the_model_is_called_as_the_pipeline_calls_it(kind, request):
    """Every argument of the first step, and the velocity."""
    folder = request.getfixturevalue(kind)
    pipeline = pipeline_of(folder)
    expected, answer = first_call(
        pipeline.transformer, lambda: draw(pipeline, seed=7, guidance_scale=2.5)
    )
    latents = unpack(expected["hidden_states"], torch.Size([1, 4, 4, 4]))
    text = {
        "prompt_embeds": expected["encoder_hidden_states"],
        "pooled_prompt_embeds": expected["pooled_projections"],
    }
    found, velocity = predicted_call(
        FAMILY, folder, pipeline.transformer, latents, 1000 * expected["timestep"], text,
        {"flux_guidance_value": 2.5},
    )  # fmt: skip
    assert_same_call(found, expected)
    assert ("guidance" in expected and expected["guidance"] is not None) == (kind == "distilled")
    torch.testing.assert_close(velocity, answer)


def test_the_guidance_leaves_the_loss_plain(base):
    """Evaluations compare phases; training's own settings move the timesteps."""
    uniform, latents = torch.tensor([0.1, 0.5, 0.9]), torch.zeros(3, 4, 8, 8)
    given = {"flux_guidance_value": 3.5}
    plain, told, training = (
        FAMILY.objective(base, settings).sigmas(uniform, latents)
        for settings in (None, given, {**given, "flow_shift": 3.0})
    )
    assert torch.equal(told, plain)
    assert not torch.equal(training, plain)


def test_samples_are_the_pipelines_own(base):
    """Guided by the empty prompt, alone and in a batch; equal seeds give equal images."""
    pipeline = pipeline_of(base)
    guided = {"true_cfg_scale": 3.0, "negative_prompt": ""}
    own = [draw(pipeline, 7, PROMPTS[0], **guided), draw(pipeline, 8, PROMPTS[1], **guided)]
    assert sample(FAMILY, base, PROMPTS, [7, 8], guidance_scale=3.0, batch_size=1) == own
    for unguided in ({"guidance_scale": 1.0}, {}):
        assert sample(FAMILY, base, PROMPTS[:1], [7], **unguided) == [draw(pipeline, 7)]
    batch = sample(FAMILY, base, PROMPTS * 2, [7, 8, 8, 7], guidance_scale=3.0)
    assert batch[:2] == own
    assert batch[0] not in batch[1:]


def test_samples_of_a_distilled_model_get_the_guidance(distilled):
    own = draw(pipeline_of(distilled), 7, guidance_scale=3.0)
    assert sample(FAMILY, distilled, PROMPTS[:1], [7], guidance_scale=3.0) == [own]
    assert sample(FAMILY, distilled, PROMPTS[:1], [7], guidance_scale=1.5) != [own]
    default = draw(pipeline_of(distilled), 7, guidance_scale=3.5)
    assert sample(FAMILY, distilled, PROMPTS[:1], [7]) == [default]
