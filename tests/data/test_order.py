"""The order of samples in buckets: one bucket a step, every sample equally often."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from zerotrain.data.draws import SampleOrder

BUCKETS = [np.arange(0, 13), np.arange(13, 18), np.arange(18, 19), np.arange(19, 47)]
EPOCH = 47


def bucket_of(place: int) -> int:
    return next(number for number, places in enumerate(BUCKETS) if place in places)


def steps(batch: int, count: int, seed: int = 7, first: int = 0) -> list[list[tuple[int, int]]]:
    """Epoch and place of each sample of the steps that follow `first`."""
    order = SampleOrder(seed, BUCKETS, batch, first)
    starts = range(first, first + count * batch, batch)
    return [[order.place(p) for p in range(start, start + batch)] for start in starts]


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_the_samples_of_a_step_are_of_one_bucket(batch):
    """And in a run each of a bucket's samples has come as often as the others, or once more."""
    seen = Counter()
    for step in steps(batch, 40 * EPOCH // batch):
        assert len({bucket_of(place) for _, place in step}) == 1
        seen.update(place for _, place in step)
        for places in BUCKETS:
            counts = [seen[place] for place in places]
            # A batch may hold a whole small bucket several times.
            assert max(counts) - min(counts) <= 1
    # 40 epochs; a bucket's last batch comes up to a batch early or late.
    for places in BUCKETS:
        expected = 40 * len(places)
        assert abs(sum(seen[place] for place in places) - expected) <= 2 * batch


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_no_draw_comes_twice(batch):
    """Epoch and place name a sample's random numbers: all positions differ."""
    drawn = [one for step in steps(batch, 300) for one in step]
    assert len({*drawn}) == len(drawn)


def test_a_step_depends_on_the_seed_and_its_number_alone():
    """Not on where training was resumed, nor on what was drawn before."""
    expected = steps(8, 60)
    for resumed in (1, 17, 59):
        assert steps(8, 60 - resumed, first=8 * resumed) == expected[resumed:]
    order = SampleOrder(7, BUCKETS, 8)
    backwards = {p: order.place(p) for p in reversed(range(480))}
    assert [[backwards[p] for p in range(s, s + 8)] for s in range(0, 480, 8)] == expected
    assert steps(8, 60, seed=8) != expected


def test_a_share_advances_its_bucket_by_a_part_of_it():
    """In each epoch a quarter, another each time, and the other buckets as a whole."""
    buckets, shares = [np.arange(6), np.arange(6, 14), np.arange(14, 19)], [1.0, 0.25, 2.5]
    order, epoch = SampleOrder(3, buckets, 1, shares=shares), 6 + 2 + 12.5
    places = [order.place(position)[1] for position in range(int(8 * epoch))]
    for number in range(0, 8, 2):
        counts = Counter(places[int(number * epoch) : int((number + 2) * epoch)])
        assert [counts[place] for place in buckets[0]] == [2] * 6
        assert [counts[place] for place in buckets[2]] == [5] * 5
        assert sum(counts[place] for place in buckets[1]) == 4
    assert [Counter(places)[place] for place in buckets[1]] == [2] * 8
    backwards = [order.place(position)[1] for position in reversed(range(len(places)))]
    assert backwards[::-1] == places


def test_whole_shares_change_nothing():
    """A list of ones is the default, and a share joins without another order of the others."""
    plain = SampleOrder(7, BUCKETS, 4)
    ones = SampleOrder(7, BUCKETS, 4, shares=[1.0] * 4)
    assert [ones.place(p) for p in range(400)] == [plain.place(p) for p in range(400)]
    more = SampleOrder(7, [*BUCKETS, np.arange(47, 57)], 4, shares=[1.0] * 4 + [0.5])
    drawn = [more.place(p) for p in range(440)]
    assert [one for one in drawn if one[1] < 47][:380] == [plain.place(p) for p in range(380)]


def test_buckets_are_mixed():
    """The batches of the large buckets do not come in one block of an epoch."""
    followed = [bucket_of(step[0][1]) for step in steps(4, 200)]
    changes = sum(a != b for a, b in pairwise(followed))
    assert changes > 80


def test_after_another_batch_size_a_step_is_still_of_one_bucket():
    """The positions of the next phase begin between two multiples of its batch size."""
    for step in steps(8, 50, first=3 * 5):
        assert len({bucket_of(place) for _, place in step}) == 1


def test_one_bucket_is_an_order_drawn_for_each_epoch():
    """Whatever the batch size: trainings on squares keep their order."""
    found = [
        [SampleOrder(7, [np.arange(10)], batch, 3).place(p) for p in range(20)]
        for batch in (1, 3, 8)
    ]
    assert found[0] == found[1] == found[2]
    assert [place for _, place in found[0][:10]] == [1, 9, 2, 8, 5, 0, 4, 3, 7, 6]
