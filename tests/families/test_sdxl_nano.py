"""The nano preset: the real classes, the same bytes from the same seed."""

from __future__ import annotations

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image

from zerotrain.models.families import autoencoders
from zerotrain.models.families import nano as nano_parts
from zerotrain.models.families.sdxl import FAMILY

CAPTIONS = ["a red house", "a blue house"]


def test_the_unet_fits_the_text_encoders(nano):
    """As in SDXL itself, it reads both, and the sizes of images."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(nano, add_watermarker=False)
    unet = pipeline.unet.config
    assert unet.addition_embed_type == "text_time"
    assert unet.cross_attention_dim == sum(
        encoder.config.hidden_size for encoder in (pipeline.text_encoder, pipeline.text_encoder_2)
    )
    assert pipeline.text_encoder_2.config.eos_token_id == pipeline.tokenizer_2.eos_token_id


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


def test_captions_that_differ_in_a_word_are_distinguished(nano):
    """Random encoders are enough: one word moves both embeddings visibly."""
    found = FAMILY.load_encoders(nano, "cpu").encode_prompts(["a red house", "a blue house"])
    for embeds in found.values():
        first, second = embeds
        assert (first - second).norm() > 0.05 * first.norm()


@pytest.mark.slow
def test_fitting_makes_the_autoencoder_show_its_images(monkeypatch, capsys):
    """Its error falls far below the images' variance, and scaled latents have unit deviation."""
    monkeypatch.setattr(autoencoders, "VAE_STEPS", 60)
    images = [
        Image.linear_gradient("L").resize((16, 16)).rotate(90 * n).convert("RGB") for n in range(4)
    ]
    pixels = autoencoders.pixels_of(images)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        autoencoder = autoencoders.build_autoencoder("AutoencoderKL", 16)
        mean, std = autoencoders.fit_autoencoder(autoencoder, images, seed=0)
    assert "fitting the autoencoder: 60 of 60 steps (100%)" in capsys.readouterr().err
    with torch.inference_mode():
        latents = autoencoder.encode(pixels).latent_dist.mode()
        error = (autoencoder.decode(latents).sample - pixels).square().mean()
    scaled = (latents - mean) / std
    assert scaled.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert scaled.std().item() == pytest.approx(1.0, rel=1e-4)
    assert error < 0.1 * pixels.var()


def test_a_tokenizer_is_the_same_in_each_call() -> None:
    """Also where pairs of tokens are equally frequent."""
    captions = ["a green boat, far away", "a red house", "a cat"]
    vocabularies = [nano_parts.train_tokenizer(captions).get_vocab() for _ in range(20)]
    made = {tuple(sorted(one.items())) for one in vocabularies}
    assert len(made) == 1
