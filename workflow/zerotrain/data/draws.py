"""Counter-based randomness: every draw is a function of the seed and its purpose.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is keyed by (seed,
stream), with the counter set to (epoch, position): generators have no history, so a resumed run or
another world size draws the same numbers.

The order of a run's samples is drawn, too. A batch holds samples of one bucket. Every bucket has an
endless stream of its samples, in an order drawn again for each of its epochs. Batch j of a bucket
takes the next samples of that stream. It is due at time (j + u) * batch / size, in epochs, with u
in [0, 1) drawn for it: batches of all buckets follow each other by their times. So every sample is
used equally often, nothing is left over at the end of an epoch, and batch k of a run is a function
of the seed and k: it depends neither on the number of processes nor on where a training was
resumed. With one bucket this is an order drawn for each epoch.

Images whose repeats are no whole number have buckets of their own, whose batches are due at a rate:
at 0.25 the stream of such a bucket advances by a quarter of its images in an epoch of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zerotrain.data.source import exact_share

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


JITTERS = 4096
"""Numbers u that are drawn at a time."""


def repeat_in_rounds(samples: NDArray[np.int64], repeats: NDArray[np.int32]) -> NDArray[np.int64]:
    """List samples as often as each is repeated: round r has those with more than r repeats.

    Equal repeats give the same list again and again.
    """
    rounds = range(int(repeats.max(initial=0)))
    return np.concatenate([samples[:0], *(samples[repeats > one] for one in rounds)])


class SampleOrder:
    """Which sample each position of a run has.

    Args:
        seed: The run's seed.
        buckets: The places of each bucket's samples, together 0 .. n - 1.
        batch_size: Samples of one step, of all processes together.
        first: A position at which a step begins. It differs from a multiple of batch_size only
            after a phase with another batch size.
        shares: How often an epoch has each bucket's samples; once by default.
    """

    def __init__(
        self,
        seed: int,
        buckets: Sequence[NDArray[np.int64]],
        batch_size: int,
        first: int = 0,
        shares: Sequence[float] | None = None,
    ) -> None:
        self._seed, self._batch = seed, batch_size
        self._buckets = buckets
        self._sizes: list[int | Fraction] = [
            len(places) if share == 1 else len(places) * exact_share(share)
            for places, share in zip(buckets, shares or [1.0] * len(buckets), strict=True)
        ]
        """Samples of each bucket in an epoch."""
        self._epoch_size = sum(self._sizes)
        self._offset = first % batch_size
        held = 2 * len(buckets)
        self._permutation = lru_cache(maxsize=held)(self._draw_permutation)
        self._jitters = lru_cache(maxsize=held)(self._draw_jitters)
        self._epoch_batches = lru_cache(maxsize=2)(self._list_epoch_batches)
        self._bucket_batch = lru_cache(maxsize=16)(self._find_bucket_batch)

    def place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position's sample, and its place in an epoch.

        The epoch is that of its bucket. With one batch size, no two positions have the same epoch
        and place; a change of it between phases may repeat or skip a few samples.
        """
        if len(self._buckets) == 1:
            bucket, within = 0, position
        else:
            number, row = divmod(position - self._offset, self._batch)
            # The phase before has used a part of the batch that starts before the offset.
            bucket, batch = self._bucket_batch(number + bool(self._offset))
            within = batch * self._batch + row
        places = self._buckets[bucket]
        epoch, index = divmod(within, len(places))
        return epoch, int(places[self._permutation(bucket, epoch)[index]])

    def _draw_permutation(self, bucket: int, epoch: int) -> NDArray[np.int64]:
        size = len(self._buckets[bucket])
        return generator(self._seed, ORDER, epoch, bucket).permutation(size)

    def _find_bucket_batch(self, number: int) -> tuple[int, int]:
        """Return the bucket of the run's batch `number`, and the number of the batch in it."""
        epoch = int(number * self._batch // self._epoch_size)
        while self._batches_before(epoch) > number:
            epoch -= 1
        while self._batches_before(epoch + 1) <= number:
            epoch += 1
        return self._epoch_batches(epoch)[number - self._batches_before(epoch)]

    def _batches_before(self, epoch: int) -> int:
        """Count the batches that are due before an epoch."""
        return sum(self._due_before(bucket, epoch) for bucket in range(len(self._buckets)))

    def _due_before(self, bucket: int, epoch: int) -> int:
        # Batch j is due before it if (j + u) * batch_size < epoch * samples: all j below the
        # quotient are, and the next one is, if its u is small enough.
        whole, rest = divmod(epoch * self._sizes[bucket], self._batch)
        return int(whole) + (self._jitter(bucket, int(whole)) * self._batch < rest)

    def _list_epoch_batches(self, epoch: int) -> list[tuple[int, int]]:
        """List bucket and number of the batches that are due within an epoch, in their order."""
        due = [
            ((batch + self._jitter(bucket, batch)) / float(size), bucket, batch)
            for bucket, size in enumerate(self._sizes)
            for batch in range(self._due_before(bucket, epoch), self._due_before(bucket, epoch + 1))
        ]
        return [(bucket, batch) for _, bucket, batch in sorted(due)]

    def _jitter(self, bucket: int, batch: int) -> float:
        block, row = divmod(batch, JITTERS)
        return float(self._jitters(bucket, block)[row])

    def _draw_jitters(self, bucket: int, block: int) -> NDArray[np.float64]:
        return generator(self._seed, BATCHES, block, bucket).random(JITTERS)
