"""Counter-based randomness: every draw is a function of the seed and of what it is for.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") keyed by (seed, stream),
its counter set to (epoch, position): no generator has a history, so a resumed run and another world
size draw the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ORDER, SAMPLE, STEP, HOLDOUT_NOISE, IMAGE_SEEDS = 1, 2, 3, 4, 5
"""Streams: what a draw is for. Training has the first three, evaluation the others."""


def generator(seed: int, stream: int, high: int, low: int) -> np.random.Generator:
    """A generator for one purpose; its first 2**128 values overlap with no other's."""
    counter = np.array([0, 0, low, high], dtype=np.uint64)
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True)
class Draw:
    """One sample of one epoch, with all that is random about it."""

    index: int
    """Position among the training samples."""
    noise: NDArray[np.float32]
    uniform: float
    """In [0, 1): where on the noise schedule."""
    drop_caption: bool


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, epoch_size: int) -> NDArray[np.int64]:
    """The order in which an epoch visits positions 0 .. epoch_size - 1."""
    return generator(seed, ORDER, epoch, 0).permutation(epoch_size)


def draw_place(seed: int, position: int, epoch_size: int) -> tuple[int, int]:
    """The epoch of the run's sample number `position`, and its place 0 .. epoch_size - 1 there."""
    epoch, within = divmod(position, epoch_size)
    return epoch, int(epoch_order(seed, epoch, epoch_size)[within])


def draw_sample(
    seed: int,
    position: int,
    *,
    count: int,
    epoch_size: int,
    shape: tuple[int, ...],
    caption_dropout: float,
    noise_offset: float = 0.0,
) -> Draw:
    """What the run's sample number `position` is.

    Args:
        seed: The run's seed.
        position: Samples drawn before this one since the start of the run.
        count: Training samples in the cache.
        epoch_size: `count` times repeats; a repeat of an image gets noise of its own.
        shape: Shape of its latents.
        caption_dropout: Probability of the empty caption.
        noise_offset: Scale of noise that is the same all over a channel.
    """
    epoch, place = draw_place(seed, position, epoch_size)
    random = generator(seed, SAMPLE, epoch, place)
    uniform, dropout = random.random(2)
    noise = random.standard_normal(shape, dtype=np.float32)
    if noise_offset:
        whole = (shape[0], *(1 for _ in shape[1:]))
        noise += np.float32(noise_offset) * random.standard_normal(whole, dtype=np.float32)
    return Draw(place % count, noise, float(uniform), bool(dropout < caption_dropout))


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the library's own generator in one step of one rank (dropout inside models)."""
    return int(generator(seed, STEP, step, rank).integers(2**63))
