"""The SD3 family against the pipeline that its users load the weights with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image
from tests.builders.images import draw_house
from tests.families import promises

from zerotrain import artifact
from zerotrain.config.read import parse_config
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.export.options import SampleOptions
from zerotrain.export.sample import sample as sample_command
from zerotrain.export.target import ExportSettings, WeightsTarget
from zerotrain.models.base import check_model_index, choose_files
from zerotrain.models.families.sd3 import FAMILY

CAPTIONS = ["a red house", "a blue house"]
TOKENS = 32
"""Of each of the nano model's tokenizers."""


def pipeline_of(folder: Path, **parts: None) -> StableDiffusion3Pipeline:
    """The pipeline as a user loads it."""
    return StableDiffusion3Pipeline.from_pretrained(folder, **parts)


@pytest.fixture
def without_t5(nano_sd3: Path, tmp_path: Path) -> Path:
    """A base that has no T5, as build_base links it."""
    folder = tmp_path / "without_t5"
    shutil.copytree(nano_sd3, folder, ignore=shutil.ignore_patterns("*_3"))
    index = check_model_index(folder / "model_index.json", FAMILY.spec, "MODEL")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def no_t5(folder: Path) -> StableDiffusion3Pipeline:
    return pipeline_of(folder, text_encoder_3=None, tokenizer_3=None)


def encoded(pipeline: StableDiffusion3Pipeline, *prompts: str, length: int) -> list[torch.Tensor]:
    """Embeddings of prompts, of the negative prompt, and both pooled, as the pipeline has them."""
    with torch.inference_mode():
        return pipeline.encode_prompt(list(prompts), None, None, max_sequence_length=length)


def test_captions_are_encoded_as_the_pipeline_encodes_prompts(nano_sd3):
    """CLIP's tokens, then T5's; the pipeline would want 256 of these, more than there are."""
    found = FAMILY.load_encoders(nano_sd3, "cpu").encode_prompts(CAPTIONS)
    embeds, _, pooled, _ = encoded(pipeline_of(nano_sd3), *CAPTIONS, length=TOKENS)
    assert torch.equal(found["prompt_embeds"], embeds)
    assert torch.equal(found["pooled_prompt_embeds"], pooled)
    assert embeds.shape[1] == 2 * TOKENS
    assert not torch.equal(embeds[0], embeds[1])


def test_a_dropped_caption_is_what_guidance_compares_with(nano_sd3):
    found = FAMILY.load_encoders(nano_sd3, "cpu").encode_prompts(["a red house", ""])
    _, negative, _, negative_pooled = encoded(pipeline_of(nano_sd3), "a red house", length=TOKENS)
    torch.testing.assert_close(found["prompt_embeds"][1:], negative)
    torch.testing.assert_close(found["pooled_prompt_embeds"][1:], negative_pooled)


@pytest.mark.slow
def test_a_length_that_is_asked_for_holds_in_encoding_and_in_sampling(nano_sd3):
    """T5's tokens alone are fewer; more than the tokenizer takes are refused."""
    found = FAMILY.load_encoders(nano_sd3, "cpu", 8).encode_prompts(CAPTIONS)
    assert found["prompt_embeds"].shape[1] == TOKENS + 8
    assert sample(nano_sd3, length=8) == [draw_house(pipeline_of(nano_sd3), max_sequence_length=8)]
    assert sample(nano_sd3, length=8) != sample(nano_sd3)
    with pytest.raises(PipelineError, match=r"max_sequence_length: 33, .* at most 32 tokens"):
        FAMILY.load_encoders(nano_sd3, "cpu", 33)


def test_the_command_samples_at_the_length_that_was_trained(nano_sd3, tmp_path):
    """Exported weights carry it, where training had one."""
    raw = {"run": "r", "family": "sd3", "base": "nano", "data": {"images": "i"}}
    raw |= {"phases": [{"name": "p", "until": 1}]}
    plain, content = (
        WeightsTarget.of(
            ExportSettings.of(parse_config(raw | {"cache": cache}, "test")), nano_sd3, tmp_path
        ).content(step=1, averaged=False)
        for cache in ({}, {"max_sequence_length": 8})
    )
    assert content.keys() - plain.keys() == {"max_sequence_length"}
    with artifact.publish(tmp_path / "weights", "weights") as draft:
        shutil.copytree(nano_sd3, draft.folder, dirs_exist_ok=True)
        draft.content = content
    values = {"number": 1, "seed": 7, "steps": 2, "guidance": 3.0, "resolution": "16", "base": None}
    (file,) = sample_command(
        SampleOptions(tmp_path / "weights", "a red house", out=tmp_path / "png", **values)
    )
    expected = draw_house(pipeline_of(nano_sd3), max_sequence_length=8)
    assert Image.open(file).tobytes() == expected
    for side in ("24", "64"):  # no multiple of a patch; more patches than there are positions
        with pytest.raises(PipelineError, match=rf"--resolution {side}: .*\d"):
            sample_command(
                SampleOptions(
                    tmp_path / "weights", "a house", out=tmp_path, **{**values, "resolution": side}
                )
            )


def test_a_base_without_t5_is_encoded_as_the_pipeline_does_it(without_t5):
    """Zeros take T5's place, 256 tokens of them."""
    found = FAMILY.load_encoders(without_t5, "cpu").encode_prompts(CAPTIONS)
    embeds, _, pooled, _ = encoded(no_t5(without_t5), *CAPTIONS, length=256)
    assert torch.equal(found["prompt_embeds"], embeds)
    assert torch.equal(found["pooled_prompt_embeds"], pooled)
    assert embeds.shape[1] == TOKENS + 256
    assert not embeds[:, TOKENS:].any()
    assert sample(without_t5) == [draw_house(no_t5(without_t5))]


def test_t5_may_be_missing_whole_but_not_in_part(nano_sd3):
    """Files are chosen of what is there; the tokenizer alone is a mistake."""
    names = [f.relative_to(nano_sd3).as_posix() for f in nano_sd3.rglob("*") if f.is_file()]
    rest = [name for name in names if not name.split("/")[0].endswith("_3")]
    assert set(choose_files(names, FAMILY.spec, "MODEL")) == set(names)
    assert set(choose_files(rest, FAMILY.spec, "MODEL")) == set(rest)
    lone = [*rest, *(name for name in names if name.startswith("tokenizer_3/"))]
    with pytest.raises(PipelineError, match="the part text_encoder_3 is missing"):
        choose_files(lone, FAMILY.spec, "MODEL")


def test_the_transformer_is_asked_as_the_pipeline_asks_it(nano_sd3):
    """One step of the pipeline goes from noise to noise - velocity."""
    noise = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    end = pipeline_of(nano_sd3)(
        "a red house",
        height=16,
        width=16,
        num_inference_steps=1,
        guidance_scale=1.0,
        max_sequence_length=TOKENS,
        latents=noise,
        output_type="latent",
    ).images
    text = FAMILY.load_encoders(nano_sd3, "cpu").encode_prompts(["a red house"])
    model = FAMILY.load_model(nano_sd3).eval()
    with torch.inference_mode():
        velocity = FAMILY.objective(nano_sd3).predict(model, noise, torch.tensor([1000.0]), text)
    torch.testing.assert_close(noise - velocity, end)
    assert velocity.abs().max() > 0.01


def with_patches(base: Path, folder: Path, patch: int) -> Path:
    """A copy of the base whose transformer takes patches of this side."""
    shutil.copytree(base, folder)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": patch}))
    return folder


@pytest.mark.parametrize(
    ("patch", "resolution", "said"),
    [
        (1, 32, "images of 8 patches a side, and the base has positions for 4"),
        (2, 20, "20 pixels are 5 latents wide, which patches of 2 x 2 do not cover"),
    ],
)
def test_images_that_the_transformer_cannot_take_are_refused(
    nano_sd3, tmp_path, patch, resolution, said
):
    """In a sentence, before a whole data set is encoded."""
    encoders = FAMILY.load_encoders(with_patches(nano_sd3, tmp_path / "base", patch), "cpu")
    with pytest.raises(PipelineError, match=f"^ERROR: train.resolution: {said}\n"):
        encoders.encode_images(torch.zeros(1, 3, resolution, resolution))


def test_cached_images_too_large_for_the_bases_positions_are_refused(nano_sd3):
    """Another base with the same autoencoder may have encoded them."""
    noisy = torch.zeros(1, 4, 4, 8)
    with pytest.raises(PipelineError, match=r"images of 8 patches a side, .* positions for 4"):
        FAMILY.objective(nano_sd3).predict(torch.nn.Identity(), noisy, torch.ones(1), {})


def test_timesteps_follow_the_base_and_the_configuration(nano_sd3):
    """logit_normal where nothing is set, as diffusers' script; patches are the tokens."""
    settings = TrainConfig(weighting_scheme="logit_normal").objective("sd3")
    default = FAMILY.objective(nano_sd3, TrainConfig().objective("sd3"))
    uniform, latents = torch.tensor([0.1, 0.5, 0.9]), torch.zeros(3, 4, 4, 6)
    drawn_sigmas = FAMILY.objective(nano_sd3, settings).sigmas(uniform, latents)
    assert torch.equal(default.sigmas(uniform, latents), drawn_sigmas)
    patch = SD3Transformer2DModel.load_config(nano_sd3 / "transformer")["patch_size"]
    assert default.image_tokens(latents) == 24 / patch**2


def sample(folder: Path, *, length: int | None = None) -> list[bytes]:
    """What `draw_house` draws, by our own sampling."""
    return promises.sample(
        FAMILY, folder, ["a red house"], [7], guidance_scale=3.0, max_sequence_length=length
    )


def test_samples_are_the_pipelines_own(nano_sd3):
    """A user who calls the pipeline with the same seed sees the same image."""
    expected = draw_house(pipeline_of(nano_sd3), max_sequence_length=TOKENS)
    assert sample(nano_sd3) == [expected]
