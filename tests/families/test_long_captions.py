"""Captions longer than the text encoders take: cut without noise, counted, or read in chunks."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.builders.images import build_nano, draw_of
from tests.families.promises import batch_of, prediction
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from zerotrain import artifact
from zerotrain.cache.reader import stacked
from zerotrain.config.models import EvaluateConfig
from zerotrain.config.read import parse_config
from zerotrain.export.options import SampleOptions
from zerotrain.export.sample import sample as sample_command
from zerotrain.export.target import ExportSettings, WeightsTarget
from zerotrain.models.families import load_family
from zerotrain.models.families import nano as nano_parts
from zerotrain.models.families.pipelines import pipeline_class
from zerotrain.models.families.prompt_tokens import LETTERS_PER_TOKEN, PromptTokenizer
from zerotrain.models.families.sd3 import FAMILY as SD3
from zerotrain.models.families.sdxl import FAMILY as SDXL

LIMIT = nano_parts.MAX_TOKENS
ROOM = LIMIT - 2
SHORT = "a red house"
LONG = " ".join(["a red house with a blue door"] * 9)
LONGER = " ".join(["a green boat on a red sea"] * 14)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the libraries log, which do not propagate it by themselves."""
    for name in ("diffusers", "transformers"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    return caplog


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_long_captions_are_cut_as_the_pipeline_cuts_them_and_nothing_is_logged(
    name, nano, nano_sd3, messages, capfd
):
    base, family = {"sdxl": (nano, SDXL), "sd3": (nano_sd3, SD3)}[name]
    prompts = [SHORT, LONG, LONGER]
    found = family.load_encoders(base, "cpu").encode_prompts(prompts)
    assert [record.getMessage() for record in messages.records] == []
    assert "exceed" not in capfd.readouterr().err
    pipeline = pipeline_class(family.spec.pipeline).from_pretrained(base)
    with torch.inference_mode():
        own = pipeline.encode_prompt(
            prompts,
            *((None, None) if name == "sd3" else ()),
            do_classifier_free_guidance=False,
            **({"max_sequence_length": LIMIT} if name == "sd3" else {}),
        )
    assert messages.records  # the pipeline's own call does warn
    assert torch.equal(found["prompt_embeds"], own[0])
    assert torch.equal(found["pooled_prompt_embeds"], own[2])


@pytest.mark.parametrize("train", [nano_parts.train_tokenizer, nano_parts.train_t5_tokenizer])
def test_the_tokens_that_are_kept_are_those_of_the_whole_text(train):
    """However many letters a token has, whatever stands between words."""
    raw = train([LONG, "don't go, zürich!"])
    tokenizer = PromptTokenizer(raw)
    letters = "abcdefg ÄÖé  \t\n.,!' #12345 猫 don't <|endoftext|> \u2581 "
    draw = random.Random(0)
    lengths = (0, 30, 200, LETTERS_PER_TOKEN * LIMIT, 900, 3000)
    texts = ["".join(draw.choices(letters, k=draw.choice(lengths))) for _ in range(400)]
    texts += ["    " * LIMIT * 5 + "a red house", "word" * 4 * LIMIT, "word " * LIMIT]
    wanted = {"padding": "max_length", "max_length": LIMIT, "truncation": True}
    for start in range(0, len(texts), 4):
        batch = texts[start : start + 4]
        assert tokenizer(batch, **wanted) == raw(batch, **wanted)


def chunked_by_hand(base: Path, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Each chunk between its own special tokens, by the models alone."""
    models = [
        (CLIPTokenizer, CLIPTextModel, ""), (CLIPTokenizer, CLIPTextModelWithProjection, "_2"),
    ]  # fmt: skip
    columns = []
    for tokenizer_class, model_class, end in models:
        tokenizer = tokenizer_class.from_pretrained(base, subfolder=f"tokenizer{end}")
        model = model_class.from_pretrained(base, subfolder=f"text_encoder{end}").eval()
        ids = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        rows = []
        for start in range(0, len(ids), ROOM):
            row = [tokenizer.bos_token_id, *ids[start : start + ROOM], tokenizer.eos_token_id]
            rows.append(row + [tokenizer.pad_token_id] * (LIMIT - len(row)))
        with torch.inference_mode():
            given = [model(torch.tensor([row]), output_hidden_states=True) for row in rows]
        columns.append(torch.cat([one.hidden_states[-2][0] for one in given]))
    return torch.cat(columns, dim=-1), given[0][0][0]


def test_chunks_have_special_tokens_of_their_own_and_the_first_is_pooled(nano):
    """The embeddings are those of the models alone; each caption has its own number of chunks."""
    prompts = [SHORT, LONG, "", LONGER]
    chunked = SDXL.load_encoders(nano, "cpu", long_captions="chunk").encode_prompts(prompts)
    cut = SDXL.load_encoders(nano, "cpu").encode_prompts(prompts)
    lengths = [len(embeds) // LIMIT for embeds in chunked["prompt_embeds"]]
    assert lengths == [1, 4, 1, 5]
    assert torch.equal(chunked["pooled_prompt_embeds"], cut["pooled_prompt_embeds"])
    for row in range(4):
        first = chunked["prompt_embeds"][row][:LIMIT]
        torch.testing.assert_close(first, cut["prompt_embeds"][row], rtol=0, atol=1e-6)
    for row, prompt in ((1, LONG), (3, LONGER)):
        embeds, pooled = chunked_by_hand(nano, prompt)
        torch.testing.assert_close(chunked["prompt_embeds"][row], embeds, rtol=0, atol=2e-6)
        torch.testing.assert_close(chunked["pooled_prompt_embeds"][row], pooled, rtol=0, atol=2e-6)


def test_a_sample_learns_the_same_in_any_batch(nano):
    """What a batch fills up short captions with is masked in the U-Net."""
    encoders = SDXL.load_encoders(nano, "cpu", long_captions="chunk")
    text = encoders.encode_prompts([SHORT, LONGER])
    single = batch_of(SDXL, nano, [SHORT, SHORT])
    sizes = {name: torch.tensor([16, 16]) for name in ("original_size", "target_size")}
    samples = [
        {
            **{name: single[name][row] for name in ("latents", "noise", "uniform")},
            **{name: tensors[row] for name, tensors in text.items()},
            **sizes,
            "crop_top_left": torch.tensor([0, 0]),
        }
        for row in range(2)
    ]
    model = SDXL.load_model(nano).eval()
    together = prediction(SDXL, nano, model, stacked(samples, torch.device("cpu")))
    for row, own in enumerate(samples):
        alone = prediction(SDXL, nano, model, stacked([own], torch.device("cpu")))
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-5)


def draw(base: Path, prompts: list[str], long_captions: str) -> list[bytes]:
    """Pixels of an image for each prompt."""
    values = EvaluateConfig(num_inference_steps=2, guidance_scale=3.0)
    images = draw_of(
        SDXL, base, prompts, [7] * len(prompts), values, resolution=16, device="cpu",
        long_captions=long_captions,
    )  # fmt: skip
    return [image.tobytes() for image in images]


def test_sampling_reads_prompts_as_training_does(nano, capsys):
    """Short prompts give the images that they give anyway; of long ones all is read, and what
    validation makes of the cached embeddings is the same image."""
    cut = draw(nano, [SHORT, LONG, LONG + " at night"], "truncate")
    assert capsys.readouterr().err.count("2 of 3 prompts exceed 32 tokens; the excess") == 1
    whole = draw(nano, [SHORT, LONG, LONG + " at night"], "chunk")
    assert "exceed" not in capsys.readouterr().err
    assert cut[1] == cut[2]
    assert whole[0] == cut[0]
    assert len({*whole, cut[1]}) == 4
    encoders = SDXL.load_encoders(nano, "cpu", long_captions="chunk")
    text = encoders.encode_prompts([LONG, ""])
    embeds, empty = ({name: t[row][None] for name, t in text.items()} for row in range(2))
    values = EvaluateConfig(num_inference_steps=2, guidance_scale=3.0)
    shape = encoders.encode_images(torch.zeros(1, 3, 16, 16)).shape[1:]
    pipeline = SDXL.live_pipeline(nano, SDXL.load_model(nano).eval(), 16, shape, values)
    latents = SDXL.sample_latents(pipeline, embeds, empty, 7, values, resolution=16, shape=shape)
    (image,) = SDXL.decode_latents(nano, latents[None], "cpu")
    assert image.tobytes() == whole[1]


def test_the_command_reads_long_prompts_as_the_weights_were_trained(nano, tmp_path):
    """Exported weights carry it, and no word of it where captions were cut."""
    raw = {"run": "r", "base": "nano", "data": {"images": "i"}, "train": {"long_captions": "chunk"}}
    values = {"number": 1, "seed": 7, "steps": 2, "guidance": 3.0, "resolution": "16", "base": None}
    contents = {}
    for name in ("chunk", "truncate"):
        config = parse_config(
            {**raw, "phases": [{"name": "p", "until": 1}], "train": {"long_captions": name}}, "test"
        )
        with artifact.publish(tmp_path / name, "weights") as draft:
            shutil.copytree(nano, draft.folder, dirs_exist_ok=True)
            settings = ExportSettings.of(config)
            draft.content = WeightsTarget.of(settings, nano, tmp_path).content(1, averaged=False)
        contents[name] = draft.content.get("long_captions")
        (file,) = sample_command(
            SampleOptions(tmp_path / name, LONG, out=tmp_path / "png", **values)
        )
        assert Image.open(file).tobytes() == draw(nano, [LONG], name)[0]
    assert contents == {"chunk": "chunk", "truncate": None}


def test_each_encoder_counts_the_captions_that_it_cuts(nano, nano_sd3, tmp_path):
    """The limits are those of the pipelines: CLIP's tokens, T5's, and Qwen's after the template."""
    captions = [SHORT, LONG, "", LONGER]
    words = len(LONG.split())

    def said(name: str, base: Path, length: int | None = None) -> list[tuple[str, list[int]]]:
        found = load_family(name).caption_limits(base, captions, length)
        return [(limit.describe("captions"), limit.exceeding) for limit in found]

    assert said("sdxl", nano) == [
        ("2 of 4 captions exceed 32 tokens; the excess is ignored", [1, 3])
    ]
    t5 = "2 of 4 captions exceed 8 tokens of tokenizer_3, which ignore the excess"
    clip = "2 of 4 captions exceed 32 tokens of tokenizer and tokenizer_2, which ignore the excess"
    assert said("sd3", nano_sd3, 8) == [(t5, [1, 3]), (clip, [1, 3])]
    build_nano("flux", tmp_path / "flux", steps=1, identity=True)
    assert [exceeding for _, exceeding in said("flux", tmp_path / "flux")] == [[1, 3]]
    build_nano("qwen_image", tmp_path / "qwen", steps=1, identity=True)
    assert said("qwen_image", tmp_path / "qwen") == []
    (limit,) = load_family("qwen_image").caption_limits(tmp_path / "qwen", captions, words)
    encoders = load_family("qwen_image").load_encoders(tmp_path / "qwen", "cpu")
    lengths = [len(row) for row in encoders.encode_prompts(captions)["prompt_embeds"]]
    assert list(limit.counts) == lengths
