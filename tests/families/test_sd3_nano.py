"""The nano SD3: the real classes, the same bytes from the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from tests.families.conftest import CAPTIONS, pictures

from zerotrain.models.families import nano as nano_parts
from zerotrain.models.families import sd3_nano
from zerotrain.models.families.sd3 import FAMILY


def build(folder: Path, seed: int) -> dict[str, bytes]:
    """Build a model; returns its files."""
    sd3_nano.SMALL.build(CAPTIONS, pictures(16, 2), seed, folder)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_families_build_the_same_sd3_from_the_same_seed(tmp_path, monkeypatch):
    """Every file is equal; another seed gives other weights alone."""
    monkeypatch.setattr(nano_parts, "VAE_STEPS", 2)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build(tmp_path / "a", seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert build(tmp_path / "b", seed=3) == first
    other = build(tmp_path / "c", seed=4)
    differing = {name.split("/")[0] for name in first if first[name] != other[name]}
    encoders = {"text_encoder", "text_encoder_2", "text_encoder_3"}
    assert differing == {*encoders, "transformer", "vae"}


def test_the_folder_is_an_sd3_in_diffusers_layout(nano_sd3):
    """The stock pipeline loads it; the transformer has at most 2.5 million parameters."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(nano_sd3)
    index = json.loads((nano_sd3 / "model_index.json").read_text())
    assert {part: index[part][1] for part in FAMILY.classes} == dict(FAMILY.classes)
    assert {path.name for path in nano_sd3.iterdir()} == {*FAMILY.parts, "model_index.json"}
    assert pipeline.transformer.num_parameters() <= 2_500_000
    assert not list(nano_sd3.rglob("*.bin"))


def test_captions_that_differ_in_a_word_are_told_apart(nano_sd3):
    """By each of the three encoders: one word moves its tokens visibly."""
    found = FAMILY.load_encoders(nano_sd3, "cpu").encode_prompts(["a red house", "a blue house"])
    tokens, width = nano_parts.MAX_TOKENS, nano_parts.TEXT_WIDTH["nano"]
    embeds = found["prompt_embeds"]
    parts = [embeds[:, :tokens, :width], embeds[:, :tokens, width:], embeds[:, tokens:]]
    for first, second in [*parts, found["pooled_prompt_embeds"]]:
        assert (first - second).norm() > 0.05 * first.norm()


def test_a_t5_tokenizer_knows_words_of_captions_and_letters_of_others():
    tokenizer = nano_parts.train_t5_tokenizer(CAPTIONS)
    assert tokenizer.tokenize("a red house") == ["▁a", "▁red", "▁house"]
    assert tokenizer.unk_token_id not in tokenizer("any other text: 42!").input_ids
    assert tokenizer("").input_ids == [tokenizer.eos_token_id]
