"""The Qwen-Image family against the pipeline that its users load the weights with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from tests.builders.images import draw_image
from tests.families.promises import (
    assert_same_call,
    batch_of,
    first_call,
    predicted_call,
    prediction,
    sample,
)

from zerotrain.cache.reader import stacked
from zerotrain.errors import PipelineError
from zerotrain.models.families.patches import unpack
from zerotrain.models.families.qwen_image import FAMILY

PROMPTS = ["a red house", "a blue house"]
LENGTHS = ["a red house", "boat", "a red house, a blue boat"]


@pytest.fixture(scope="module")
def base(nano_qwen_image: Path) -> Path:
    return nano_qwen_image


def pipeline_of(folder: Path) -> QwenImagePipeline:
    """The pipeline as a user loads it."""
    return QwenImagePipeline.from_pretrained(folder)


def draw(pipeline: QwenImagePipeline, seed: int, prompt: str, scale: float = 3.0) -> bytes:
    negative = "" if scale > 1 else None
    return draw_image(pipeline, prompt, seed, true_cfg_scale=scale, negative_prompt=negative)


def test_the_nano_tokenizer_has_as_many_tokens_before_a_prompt_as_the_pipeline_drops(base):
    """What is left of the template are the prompt's own tokens and those that end its turn."""
    pipeline = pipeline_of(base)
    tokens = pipeline.tokenizer(pipeline.prompt_template_encode.format("a red house")).input_ids
    rest = pipeline.tokenizer.decode(tokens[pipeline.prompt_template_encode_start_idx :])
    assert rest == "a red house<|im_end|>\n<|im_start|>assistant\n"


def test_any_prompt_can_be_encoded(base):
    """Every byte has a token."""
    tokenizer = pipeline_of(base).tokenizer
    for prompt in ["zürich, 猫!", "0 1 2", "~\x7f|", "HOUSE", "\N{PILE OF POO}"]:
        assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt


def test_captions_are_encoded_as_the_pipeline_encodes_prompts(base):
    """Each in its own length, with the numbers that it has alone."""
    found = FAMILY.load_encoders(base, "cpu").encode_prompts(LENGTHS)["prompt_embeds"]
    pipeline = pipeline_of(base)
    with torch.inference_mode():
        for prompt, embeds in zip(LENGTHS, found, strict=True):
            assert torch.equal(embeds, pipeline.encode_prompt(prompt)[0][0])
        together, mask = pipeline.encode_prompt(LENGTHS)
    batch = stacked([{"prompt_embeds": embeds} for embeds in found], torch.device("cpu"))
    assert torch.equal(batch["prompt_embeds_mask"], mask.bool())
    torch.testing.assert_close(batch["prompt_embeds"], together, rtol=1e-4, atol=1e-5)


def test_a_longer_caption_is_cut(base):
    encoders = FAMILY.load_encoders(base, "cpu", 4)
    assert [len(found) for found in encoders.encode_prompts(LENGTHS)["prompt_embeds"]] == [4] * 3
    with pytest.raises(PipelineError, match=r"cache\.max_sequence_length: 2000, and the base"):
        FAMILY.load_encoders(base, "cpu", 2000)


def test_the_model_is_called_as_the_pipeline_calls_it(base):
    """Every argument of the first step, of two prompts of different lengths, and the velocity."""
    pipeline = pipeline_of(base)
    arguments = {"height": 16, "width": 24, "num_inference_steps": 1, "true_cfg_scale": 1.0}
    expected, answer = first_call(
        pipeline.transformer,
        lambda: pipeline(LENGTHS[:2], generator=torch.Generator().manual_seed(0), **arguments),
    )
    latents = unpack(expected["hidden_states"], torch.Size([2, 4, 4, 6]))
    embeds = FAMILY.load_encoders(base, "cpu").encode_prompts(LENGTHS[:2])["prompt_embeds"]
    text = stacked([{"prompt_embeds": found} for found in embeds], torch.device("cpu"))
    found, velocity = predicted_call(
        FAMILY, base, pipeline.transformer, latents, 1000 * expected["timestep"], text
    )
    found["encoder_hidden_states_mask"] = found["encoder_hidden_states_mask"].long()
    for calls in (found, expected):
        embedded = calls.pop("encoder_hidden_states")
        torch.testing.assert_close(embedded, text["prompt_embeds"], rtol=1e-4, atol=1e-5)
    assert_same_call(found, expected)
    torch.testing.assert_close(velocity, answer, rtol=1e-4, atol=1e-5)


def test_padding_changes_no_velocity(base):
    """A short caption next to a long one, and alone."""
    model = FAMILY.load_model(base).eval()
    batch = batch_of(FAMILY, base, LENGTHS)
    together = prediction(FAMILY, base, model, batch)
    alone = {name: tensor[1:2] for name, tensor in batch.items()}
    length = int(alone["prompt_embeds_mask"].sum())
    alone["prompt_embeds"] = alone["prompt_embeds"][:, :length]
    del alone["prompt_embeds_mask"]
    torch.testing.assert_close(
        prediction(FAMILY, base, model, alone), together[1:2], rtol=1e-4, atol=1e-5
    )


def test_the_empty_model_has_the_rotary_frequencies_of_the_loaded_one(base):
    """They are in no file; parameters are on the meta device."""
    empty, loaded = FAMILY.empty_model(base), FAMILY.load_model(base)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    for name in ("pos_freqs", "neg_freqs"):
        assert torch.equal(getattr(empty.pos_embed, name), getattr(loaded.pos_embed, name))


def test_samples_are_the_pipelines_own(base):
    """Guided by the empty prompt and without guidance; equal seeds give equal images."""
    pipeline = pipeline_of(base)
    own = [draw(pipeline, 7, PROMPTS[0]), draw(pipeline, 8, PROMPTS[1])]
    assert sample(FAMILY, base, PROMPTS, [7, 8], guidance_scale=3.0, batch_size=1) == own
    assert sample(FAMILY, base, PROMPTS[:1], [7]) == [draw(pipeline, 7, PROMPTS[0], 4.0)]
    unguided = draw(pipeline, 7, PROMPTS[0], 1.0)
    assert sample(FAMILY, base, PROMPTS[:1], [7], guidance_scale=1.0) == [unguided]
    batch = sample(FAMILY, base, PROMPTS * 2, [7, 8, 8, 7], guidance_scale=3.0)
    assert batch[0] not in batch[1:]
