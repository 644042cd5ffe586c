"""`vae: identity`: pixels are the latents, and no tool needs to know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, QwenImagePipeline
from tests.builders.images import CAPTIONS, make_pictures
from tests.families.promises import sample

from zerotrain.errors import PipelineError
from zerotrain.models.families import flux, qwen_image, sdxl
from zerotrain.models.families.autoencoders import NAME, identity_autoencoder
from zerotrain.models.families.nano import build_pipeline

PIPELINES = [
    pytest.param(qwen_image.FAMILY, QwenImagePipeline, id="qwen_image"),
    pytest.param(flux.FAMILY, FluxPipeline, id="flux"),
]


def colours(side: int) -> torch.Tensor:
    """Images [4, 3, side, side] of all values that 8 bits have: black, white, and two of noise."""
    levels = torch.randint(256, (4, 3, side, side), generator=torch.Generator().manual_seed(0))
    levels[0], levels[1] = 0, 255
    return levels / 127.5 - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLQwenImage"])
def test_what_is_encoded_and_decoded_is_what_was_given(name, dtype):
    """Within 2e-6 in float32; in 16 bits, too, every one of the 256 levels comes back."""
    autoencoder = identity_autoencoder(name).to(dtype).eval()
    pixels = colours(16)
    given = pixels.unsqueeze(2) if name == "AutoencoderKLQwenImage" else pixels
    with torch.inference_mode():
        posterior = autoencoder.encode(given.to(dtype)).latent_dist
        decoded = autoencoder.decode(posterior.mode()).sample
    assert posterior.std.max() < 1e-6
    for found in (posterior.mode(), decoded):
        apart = (found.float().reshape(pixels.shape) - pixels).abs().max()
        assert apart < (2e-6 if dtype == torch.float32 else 1 / 255)


@pytest.mark.parametrize(("family", "pipeline"), PIPELINES)
def test_a_base_of_pixels_is_a_stock_pipeline(family, pipeline, tmp_path):
    """Latents are pixels, samples are the pipeline's own, and vae/config.json says what it is."""
    build_pipeline(family, CAPTIONS, make_pictures(16), 0, tmp_path, identity=True)
    pixels = colours(16)
    latents = family.load_encoders(tmp_path, "cpu").encode_images(pixels)
    torch.testing.assert_close(latents, pixels, rtol=0, atol=2e-6)
    stock = pipeline.from_pretrained(tmp_path)
    assert (stock.vae_scale_factor, stock.transformer.config.in_channels) == (1, 12)
    own = stock(
        CAPTIONS[0],
        height=16,
        width=16,
        num_inference_steps=2,
        true_cfg_scale=3.0,
        negative_prompt="",
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    assert sample(family, tmp_path, [CAPTIONS[0]], [7], guidance_scale=3.0) == [own.tobytes()]
    assert json.loads((tmp_path / "vae" / "config.json").read_text())["_name_or_path"] == NAME


def test_the_autoencoder_of_a_base_for_pixels_is_replaced(tmp_path):
    """Links of the base are removed, not what they lead to."""
    nano, linked = tmp_path / "nano", tmp_path / "linked"
    build_pipeline(qwen_image.FAMILY, CAPTIONS, make_pictures(16), 0, nano, identity=True)
    (nano / "vae" / "config.json").write_text("{}")
    for path in nano.rglob("*.*"):
        link = linked / path.relative_to(nano)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    qwen_image.FAMILY.replace_autoencoder(linked)
    pixels = colours(16)
    latents = qwen_image.FAMILY.load_encoders(linked, "cpu").encode_images(pixels)
    torch.testing.assert_close(latents, pixels, rtol=0, atol=2e-6)
    assert (nano / "vae" / "config.json").read_text() == "{}"


def test_a_denoiser_of_other_latents_is_refused(nano):
    with pytest.raises(PipelineError, match="the unet of this base takes latents of 4"):
        sdxl.FAMILY.replace_autoencoder(nano)
    assert (Path(nano) / "vae" / "config.json").is_file()
