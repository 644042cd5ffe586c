"""What a key depends on, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerotrain.cache.sample_keys import Encoder, conditioning_key, latents_key, text_key, tokens_key
from zerotrain.data.buckets import View, square_view

ENCODER = Encoder("sdxl", {"vae": "1"}, "fp32", "cpu", "fp32")
IMAGE = ("a", square_view((0, 0, 8), 32), ENCODER)


def caption_key(encoder: Encoder = ENCODER, **changed: Any) -> str:
    """The key of embeddings, one thing changed."""
    return text_key("a", encoder, **{"max_sequence_length": None, **changed})


def test_all_that_the_user_decides_changes_the_key():
    """The kind of the device and the type in which is computed are part of it."""
    encoders = [
        ENCODER,
        replace(ENCODER, family="sd3"),
        replace(ENCODER, parts={"vae": "2"}),
        replace(ENCODER, parts={"vae": "1", "more": "1"}),
        replace(ENCODER, computed="bf16"),
        replace(ENCODER, device="cuda"),
        replace(ENCODER, dtype="bf16"),
        replace(ENCODER, pipeline="QwenImageEditPipeline"),
    ]
    keys = [
        *(latents_key(*IMAGE[:2], encoder) for encoder in encoders),
        *(conditioning_key("a", encoder) for encoder in encoders),
        *(caption_key(encoder) for encoder in encoders),
        latents_key("b", *IMAGE[1:]),
        latents_key("a", square_view((1, 0, 8), 32), ENCODER),
        latents_key("a", square_view((0, 0, 8), 64), ENCODER),
        latents_key("a", View((0, 0, 8, 4), (32, 16)), ENCODER),
        latents_key("a", View((0, 0, 8, 4), (64, 32)), ENCODER),
        latents_key("a", View((0, 0, 8, 4), (32, 32)), ENCODER),
        latents_key(*IMAGE, flipped=True),
        conditioning_key("b", ENCODER),
        text_key("b", ENCODER, max_sequence_length=None),
        caption_key(max_sequence_length=64),
        caption_key(long_captions="chunk"),
        caption_key(conditioning="a"),
        tokens_key("a", 32, family="causal_lm", parts={}),
        tokens_key("a", 64, family="causal_lm", parts={}),
        tokens_key("a", 32, family="seq2seq_lm", parts={}),
    ]
    assert len(set(keys)) == len(keys)
    assert latents_key(*IMAGE) == keys[0]
