"""The nano preset: the real classes, the same bytes from the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image

from zerotrain.models.families import nano as nano_parts
from zerotrain.models.families import sdxl_nano
from zerotrain.models.families.sdxl import FAMILY

CAPTIONS = ["a red house", "a blue house"]


@pytest.fixture
def few_steps(monkeypatch) -> None:
    monkeypatch.setattr(nano_parts, "VAE_STEPS", 2)


def build(folder: Path, seed: int, colour: str = "navy") -> dict[str, bytes]:
    """Build a model; returns its files."""
    images = [Image.new("RGB", (16, 16), name) for name in ("red", colour)]
    sdxl_nano.SMALL.build(CAPTIONS, images, seed, folder)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.usefixtures("few_steps")
def test_families_build_the_same_model_from_the_same_seed(tmp_path):
    """Every file is equal, whatever the global generator was before, which is left as it was."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build(tmp_path / "a", seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert build(tmp_path / "b", seed=3) == first
    other = build(tmp_path / "c", seed=4)
    differing = {name for name in first if first[name] != other[name]}
    assert {name.split("/")[0] for name in differing} == {
        "text_encoder",
        "text_encoder_2",
        "unet",
        "vae",
    }


def test_the_folder_is_an_sdxl_in_diffusers_layout(nano):
    """The stock pipeline loads it; model_index.json names the classes that the family requires."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(nano, add_watermarker=False)
    index = json.loads((nano / "model_index.json").read_text())
    assert {part: index[part][1] for part in FAMILY.classes} == dict(FAMILY.classes)
    assert {path.name for path in nano.iterdir()} == {*FAMILY.parts, "model_index.json"}
    unet = pipeline.unet.config
    assert unet.addition_embed_type == "text_time"
    assert unet.cross_attention_dim == sum(
        encoder.config.hidden_size for encoder in (pipeline.text_encoder, pipeline.text_encoder_2)
    )
    assert pipeline.text_encoder_2.config.eos_token_id == pipeline.tokenizer_2.eos_token_id
    assert not list(nano.rglob("*.bin"))


def test_any_prompt_can_be_encoded():
    """Every byte has a token within a word and one at its end: nothing becomes unknown."""
    tokenizer = nano_parts.train_tokenizer(CAPTIONS)
    for prompt in ["zürich, 猫!", "0 1 2", "~\x7f|", "q", "HOUSE", "\N{PILE OF POO}"]:
        assert tokenizer.unk_token_id not in tokenizer(prompt).input_ids[1:-1], prompt
        decoded = tokenizer.decode(tokenizer(prompt).input_ids[1:-1])
        assert decoded.replace(" ", "") == prompt.lower().replace(" ", "")
    assert tokenizer("").input_ids == [tokenizer.bos_token_id, tokenizer.eos_token_id]


def test_words_of_the_captions_are_single_tokens():
    tokenizer = nano_parts.train_tokenizer(CAPTIONS * 2)
    assert tokenizer.tokenize("a red house") == ["a</w>", "red</w>", "house</w>"]


def test_captions_that_differ_in_a_word_are_told_apart(nano):
    """Random encoders are enough: one word moves both embeddings visibly."""
    found = FAMILY.load_encoders(nano, "cpu").encode_prompts(["a red house", "a blue house"])
    for embeds in found.values():
        first, second = embeds
        assert (first - second).norm() > 0.05 * first.norm()


def test_fitting_makes_the_autoencoder_show_its_images(monkeypatch, capsys):
    """Its error falls far below the images' variance, and scaled latents have unit deviation."""
    monkeypatch.setattr(nano_parts, "VAE_STEPS", 60)
    images = [
        Image.linear_gradient("L").resize((16, 16)).rotate(90 * n).convert("RGB") for n in range(4)
    ]
    pixels = nano_parts.pixels_of(images)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        autoencoder = nano_parts.build_autoencoder(16)
        mean, std = nano_parts.fit_autoencoder(autoencoder, images, seed=0)
    assert "fitting the autoencoder: 60 of 60 steps (100%)" in capsys.readouterr().err
    with torch.inference_mode():
        latents = autoencoder.encode(pixels).latent_dist.mode()
        error = (autoencoder.decode(latents).sample - pixels).square().mean()
    scaled = (latents - mean) / std
    assert scaled.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert scaled.std().item() == pytest.approx(1.0, rel=1e-4)
    assert error < 0.1 * pixels.var()
