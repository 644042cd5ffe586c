"""Parts of the small image models: tokenizers, text encoders, autoencoders.

They need no hub: a tokenizer is trained on the captions, an autoencoder is fitted to the images,
text encoders keep their random initial weights, which still distinguish captions. `micro` has the
autoencoder of `nano`, wider text encoders and a denoiser with ten times as many parameters.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTokenizer, T5Config, T5Tokenizer

from zerotrain.artifact.documents import parse_json
from zerotrain.data.buckets import to_pixels
from zerotrain.machine.progress_bar import progress

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerotrain.models.families.fitted_autoencoder import FittedAutoencoders

START, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY = 2048
"""The maximum; a few captions need far fewer tokens."""
MAX_TOKENS = 32
RARE = -20.0
"""Logarithm of the probability of a single character."""
TEXT_WIDTH = {"nano": 64, "micro": 128}
"""Width of CLIP's embeddings, pooled and not; T5's are twice as wide."""
TEXT_INITIALIZER_FACTOR = 2.0
"""Larger than CLIP's 1, so that untrained encoders distinguish captions better. From about 5, the
attention saturates and they distinguish them less."""

PIXELS_PER_LATENT = 4
VAE_STEPS = 200
VAE_BATCH = 8
VAE_LEARNING_RATE = 4e-3
VAE_KL_WEIGHT = 1e-5
LATENTS_MEASURED = 256
ENDS_OF_BRANCHES = r"\.(conv2|to_out\.0|proj)\."
"""Last parameters of a residual branch, in both classes of autoencoder."""


def train_tokenizer(captions: Sequence[str]) -> Any:
    """Train a CLIP tokenizer (byte-level BPE with `</w>`) on the captions.

    Every byte has a token with and without `</w>`, so that any later prompt can be encoded: BPE
    training adds `</w>` only to the bytes that end a word of the captions.
    """
    template = CLIPTokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer = template.normalizer
    trained.pre_tokenizer = template.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ends = [byte + "</w>" for byte in alphabet]
    trained.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY + len(ends),
            # Pairs of equal counts are merged in the order of their tokens' numbers, which those
            # with `</w>` would get in the order of a hash with another seed in each call.
            special_tokens=[*alphabet, *ends],
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    merges = [
        tuple(pair) for pair in parse_json(trained.to_str(), "the tokenizer")["model"]["merges"]
    ]
    tokens = [
        *alphabet,
        *ends,
        *("".join(pair) for pair in merges),
        START,
        END,
    ]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def text_config(tokenizer: Any, width: int, pooled_width: int | None = None) -> Any:
    """Return a CLIP text encoder's configuration; the pooled width defaults to `width`."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=pooled_width or width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_factor=TEXT_INITIALIZER_FACTOR,
    )


def train_t5_tokenizer(captions: Sequence[str]) -> Any:
    """Train a T5 tokenizer (Unigram) of the captions' words and of printable ASCII characters."""
    words = Counter(f"\u2581{word}" for caption in captions for word in caption.split())
    total = sum(words.values())
    known = [(word, math.log(count / total)) for word, count in words.most_common(VOCABULARY)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = [("\u2581", RARE), *((sign, RARE) for sign in string.printable.strip())]
    pieces = dict([*reversed(letters), *known])  # one-letter words have a word's probability
    return T5Tokenizer(
        vocab=special + sorted(pieces.items()), extra_ids=0, model_max_length=MAX_TOKENS
    )


def t5_config(tokenizer: Any, width: int) -> Any:
    """Return a T5 encoder's configuration, as wide as two CLIP encoders of this width."""
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=2 * width,
        d_kv=32,
        d_ff=4 * width,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
    )


def build_autoencoder(side: int) -> Any:
    """Build an autoencoder that turns 4 x 4 pixels into one latent of 4 channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=side,
        force_upcast=False,
        mid_block_add_attention=False,
    )


def fit_autoencoder(
    autoencoder: Any,
    images: Sequence[Image],
    seed: int,
    *,
    frames: bool = False,
    store: FittedAutoencoders | None = None,
) -> tuple[float, float]:
    """Fit an autoencoder to the images by squared error and a small KL term.

    Args:
        autoencoder: The autoencoder, initialised from its seed.
        images: Squares of one size.
        seed: Seed of the draws of images.
        frames: Whether the autoencoder takes videos; images are then single frames.
        store: Store that the result is read from or added to.

    Returns:
        The latents' mean and standard deviation.
    """
    fit = partial(_fit, autoencoder, images, seed, frames)
    return store.load_or_fit(autoencoder, seed, fit) if store else fit()


def _fit(autoencoder: Any, images: Sequence[Image], seed: int, frames: bool) -> tuple[float, float]:
    """Fit with residual branches that start at zero: a nearly linear model needs half the time."""
    draw = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(
        autoencoder.parameters(), lr=VAE_LEARNING_RATE, weight_decay=0.0, fused=True
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=VAE_LEARNING_RATE, total_steps=VAE_STEPS
    )

    def shown(chosen: Iterable[int]) -> torch.Tensor:
        pixels = pixels_of([images[i] for i in chosen])
        return pixels.unsqueeze(2) if frames else pixels

    for name, parameter in autoencoder.named_parameters():
        if re.search(ENDS_OF_BRANCHES, name):
            torch.nn.init.zeros_(parameter)
    autoencoder.train()
    with _single_frames(autoencoder):
        for _ in progress(range(VAE_STEPS), VAE_STEPS, "fitting the autoencoder", "step"):
            pixels = shown(draw.integers(len(images), size=VAE_BATCH))
            posterior = autoencoder.encode(pixels).latent_dist
            decoded = autoencoder.decode(posterior.sample()).sample
            loss = (decoded - pixels).square().mean() + VAE_KL_WEIGHT * posterior.kl().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    autoencoder.eval()
    with torch.inference_mode():
        chosen = range(0, len(images), -(-len(images) // LATENTS_MEASURED))
        latents = autoencoder.encode(shown(chosen)).latent_dist.mode()
    return float(latents.mean()), float(latents.std())


@contextmanager
def _single_frames(autoencoder: Any) -> Iterator[None]:
    """Make convolutions over time compute only the last tap, half of the work.

    Before a single frame there are only zeros.
    """
    convolutions = [m for m in autoencoder.modules() if isinstance(m, QwenImageCausalConv3d)]
    for convolution in convolutions:
        convolution.forward = partial(_of_one_frame, convolution)
    yield
    for convolution in convolutions:
        del convolution.forward


def _of_one_frame(convolution: Any, x: torch.Tensor, cache_x: None = None) -> torch.Tensor:
    """Compute QwenImageCausalConv3d's output for x [B, C, 1, H, W]."""
    padding = convolution._padding[0]
    weight, bias = convolution.weight[:, :, -1], convolution.bias
    return torch.nn.functional.conv2d(x.squeeze(2), weight, bias, padding=padding).unsqueeze(2)


def pixels_of(images: Sequence[Image]) -> torch.Tensor:
    """Convert RGB images of one size to float32 [B, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(np.stack([to_pixels(image) for image in images]))
