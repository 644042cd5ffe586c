"""Counter-based randomness: every draw is a function of the seed and its purpose.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is keyed by (seed,
stream), with the counter set to (epoch, position): generators have no history, so a resumed run or
another world size draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ORDER, SAMPLE, STEP, HOLDOUT_NOISE, IMAGE_SEEDS, ROUTE, CROP, BATCHES = 1, 2, 3, 4, 5, 6, 7, 8
TAGS, VARIANT = 9, 10
"""Streams by purpose: HOLDOUT_NOISE and IMAGE_SEEDS for evaluation, the others for training."""


def generator(seed: int, stream: int, high: int, low: int) -> np.random.Generator:
    """Build a generator for one purpose; its first 2**128 values overlap with no other's."""
    counter = np.array([0, 0, low, high], dtype=np.uint64)
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True)
class Draw:
    """All random values of one sample of one epoch."""

    noise: NDArray[np.float32]
    uniform: float
    """In [0, 1): the position on the noise schedule."""
    drop_caption: bool
    flip: bool = False


def draw_sample(
    seed: int,
    epoch: int,
    place: int,
    *,
    shape: tuple[int, ...],
    caption_dropout: float,
    noise_offset: float = 0.0,
    random_flip: bool = False,
) -> Draw:
    """Draw the random values of a sample.

    Args:
        seed: The run's seed.
        epoch: The epoch, and `place` the sample's place in it, as SampleOrder.place returns them.
            Each repeat of an image has a place of its own, and so different noise.
        place: See `epoch`.
        shape: Shape of its latents.
        caption_dropout: Probability of the empty caption.
        noise_offset: Scale of noise that is constant within a channel.
        random_flip: Whether to draw the mirror image in half of the cases.
    """
    random = generator(seed, SAMPLE, epoch, place)
    uniform, dropout = random.random(2)
    noise = random.standard_normal(shape, dtype=np.float32)
    if noise_offset:
        whole = (shape[0], *(1 for _ in shape[1:]))
        noise += np.float32(noise_offset) * random.standard_normal(whole, dtype=np.float32)
    flip = bool(random_flip and random.random() < 0.5)
    return Draw(noise, float(uniform), bool(dropout < caption_dropout), flip)


@dataclass(frozen=True)
class VariantDraw:
    """Which of the stored variants of a sample is trained, each in [0, 1) of their number."""

    caption: float
    view: float


def draw_variant(seed: int, epoch: int, place: int) -> VariantDraw:
    """Draw the variants of a sample.

    Args:
        seed: The run's seed.
        epoch: As for draw_sample.
        place: As for draw_sample.
    """
    caption, view = generator(seed, VARIANT, epoch, place).random(2)
    return VariantDraw(float(caption), float(view))


def draw_routes(
    seed: int, epoch: int, place: int, *, kept: Sequence[int], tokens: int
) -> NDArray[np.int64]:
    """Draw the token orders of a sample, int64 [routes, tokens].

    Args:
        seed: The run's seed.
        epoch: As for draw_sample.
        place: As for draw_sample.
        kept: Number of tokens that each route keeps: the first of its order, which are sorted.
        tokens: Number of tokens.
    """
    random = generator(seed, ROUTE, epoch, place)
    orders = np.stack([random.permutation(tokens) for _ in kept])
    for order, count in zip(orders, kept, strict=True):
        order[:count].sort()
    return orders


def step_seed(seed: int, step: int, rank: int) -> int:
    """Compute the seed of the library's generator for one step of one rank (for dropout)."""
    return int(generator(seed, STEP, step, rank).integers(2**63))
