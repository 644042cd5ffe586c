"""What the cache stage loads."""

from __future__ import annotations

import pytest

from zerotrain.plan.architecture import find_architecture
from zerotrain.plan.cache_size import encoder_bytes

VAE, TEXT = 126_892_531, 8_292_166_656
"""Parameters of Qwen-Image's autoencoder and of its text encoder."""


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_text_encoders_take_the_bytes_of_their_type_and_the_autoencoder_four(dtype, size):
    found = encoder_bytes(find_architecture("qwen_image", "Qwen/Qwen-Image"), dtype)
    assert found == {"text_encoder": size * TEXT, "vae": 4 * VAE}
