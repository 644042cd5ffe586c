"""The SDXL family against the pipeline that its users load the weights with."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from tests.builders.images import draw_house
from tests.families import promises
from tests.families.promises import changed

from zerotrain.models.families.sdxl import FAMILY

sample = partial(promises.sample, FAMILY)


def pipeline_of(folder: Path) -> StableDiffusionXLPipeline:
    """The pipeline as a user loads it."""
    return StableDiffusionXLPipeline.from_pretrained(folder, add_watermarker=False)


def test_captions_are_encoded_as_the_pipeline_encodes_prompts(nano):
    captions = ["a red house", "a blue house"]
    found = FAMILY.load_encoders(nano, "cpu").encode_prompts(captions)
    embeds, _, pooled, _ = pipeline_of(nano).encode_prompt(captions)
    assert torch.equal(found["prompt_embeds"], embeds)
    assert torch.equal(found["pooled_prompt_embeds"], pooled)
    assert not torch.equal(embeds[0], embeds[1])


@pytest.mark.parametrize("zeros", [True, False])
def test_a_dropped_caption_is_what_guidance_compares_with(nano, tmp_path, zeros):
    """The empty caption is the pipeline's default negative prompt, whatever the base says of it."""
    base = changed(nano, tmp_path / "base", "model_index.json", force_zeros_for_empty_prompt=zeros)
    found = FAMILY.load_encoders(base, "cpu").encode_prompts(["a red house", ""])
    _, negative, _, negative_pooled = pipeline_of(base).encode_prompt(["a red house"])
    torch.testing.assert_close(found["prompt_embeds"][1:], negative)
    torch.testing.assert_close(found["pooled_prompt_embeds"][1:], negative_pooled)
    assert bool((found["prompt_embeds"][1] == 0).all()) == zeros
    assert found["prompt_embeds"][0].abs().sum() > 0


def test_sizes_reach_the_unet_in_the_pipelines_order(nano):
    """Heights before widths: original size, crop, target size."""
    asked = {}

    class Denoiser(torch.nn.Linear):
        def forward(self, noisy, timesteps, *, encoder_hidden_states, added_cond_kwargs, **rest):
            asked.update(added_cond_kwargs, hidden=encoder_hidden_states)
            return (torch.zeros_like(noisy),)

    def pair(first: int, second: int) -> torch.Tensor:
        return torch.tensor([[first, second]])

    text = {"prompt_embeds": torch.ones(1, 5, 6), "pooled_prompt_embeds": torch.ones(1, 7)}
    zeros = torch.zeros(1, 4, 2, 2)
    batch = {
        **{"latents": zeros, "noise": zeros, "uniform": torch.zeros(1).double(), **text},
        **{"original_size": pair(30, 40), "crop_top_left": pair(1, 2)},
        "target_size": pair(16, 16),
    }
    FAMILY.objective(nano).loss(Denoiser(1, 1), batch)
    pipeline = pipeline_of(nano)
    expected = pipeline._get_add_time_ids(
        (30, 40), (1, 2), (16, 16), torch.float32, pipeline.text_encoder_2.config.projection_dim
    )
    assert torch.equal(asked["time_ids"], expected)
    assert torch.equal(asked["text_embeds"], text["pooled_prompt_embeds"])
    assert torch.equal(asked["hidden"], text["prompt_embeds"])


def test_samples_follow_from_their_seeds(nano):
    """Equal seeds give equal images, also from batches of another order; other seeds others."""
    first, second = sample(nano, ["a red house"] * 2, [1, 2])
    assert first != second
    assert sample(nano, ["a red house"] * 2, [2, 1]) == [second, first]


def test_samples_are_the_pipelines_own(nano):
    """A user who calls the pipeline with the same seed sees the same image."""
    assert sample(nano, ["a red house"], [7], guidance_scale=3.0) == [draw_house(pipeline_of(nano))]


def test_sampling_is_not_silent(nano, capsys):
    """Progress counts images, whatever the size of batches."""
    prompts, seeds = ["a red house"] * 3, [1, 2, 3]
    assert len(sample(nano, prompts, seeds, batch_size=2)) == 3
    assert "sampling images: 3 of 3 images (100%)" in capsys.readouterr().err


def test_the_configuration_chooses_the_sampler(nano):
    prompts, seeds = ["a red house"], [0]
    default = sample(nano, prompts, seeds)
    assert sample(nano, prompts, seeds, scheduler="ddim") == default
    assert sample(nano, prompts, seeds, scheduler="euler") != default
