"""What the cache stage loads."""

from __future__ import annotations

import pytest

from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.shape import Shape
from zerotrain.launch.planner.storage import cached_bytes, encoder_bytes

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
VAE, TEXT = 126_892_531, 8_292_166_656
"""Parameters of Qwen-Image's autoencoder and of its text encoder."""


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_text_encoders_take_the_bytes_of_their_type_and_the_autoencoder_four(dtype, size):
    found = encoder_bytes(find_architecture("qwen_image", "Qwen/Qwen-Image"), dtype)
    assert found == {"text_encoder": size * TEXT, "vae": 4 * VAE}


@pytest.mark.parametrize(("flips", "images"), [(False, 1), (True, 2)])
def test_mirror_images_have_latents_of_their_own(flips, images):
    """data.random_flip encodes each image twice, and its caption once."""
    shape = Shape(batch=1, resolution=1024)
    latents, text = cached_bytes(find_architecture("sdxl", SDXL), shape, "fp32", flips=flips)
    assert latents == images * 4 * 4 * 128 * 128
    assert text == 4 * (77 * 2048 + 1280)


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("flux", "black-forest-labs/FLUX.1-dev"),
        ("flux", "black-forest-labs/FLUX.1-Fill-dev"),
        ("qwen_image", "Qwen/Qwen-Image"),
    ],
)
def test_packed_latents_have_16_channels(family, base):
    """Whatever the transformer takes in addition, as FLUX.1 Fill does."""
    shape = Shape(batch=1, resolution=1024)
    latents, _ = cached_bytes(find_architecture(family, base), shape, "bf16", flips=False)
    assert latents == 2 * 16 * 128 * 128
