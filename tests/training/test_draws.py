"""Every draw is a function of the seed and of what it is for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from zerotrain.data.draws import SampleOrder, draw_routes, draw_sample, generator, step_seed

COUNT, REPEATS = 5, 2
EPOCH = COUNT * REPEATS
SHAPE = (4, 2, 3)


@dataclass(frozen=True)
class Drawn:
    """What a position of the run has."""

    index: int
    noise: NDArray[np.float32]
    uniform: float
    drop_caption: bool
    flip: bool


def order(seed: int = 7) -> SampleOrder:
    return SampleOrder(seed, [np.arange(EPOCH)], 4)


def draw(position: int, *, seed: int = 7, dropout: float = 0.3, random_flip: bool = False) -> Drawn:
    """The run's sample number `position`."""
    epoch, place = order(seed).place(position)
    one = draw_sample(
        seed, epoch, place, shape=SHAPE, caption_dropout=dropout, random_flip=random_flip
    )
    return Drawn(place % COUNT, one.noise, one.uniform, one.drop_caption, one.flip)


def key(one: Drawn) -> tuple[object, ...]:
    """All of a draw, to be compared bit for bit."""
    return one.index, one.noise.tobytes(), one.uniform, one.drop_caption


def places_of(epoch: int) -> list[int]:
    """The places of an epoch, in the order of its positions."""
    found = [order().place(position) for position in range(epoch * EPOCH, (epoch + 1) * EPOCH)]
    assert {one for one, _ in found} == {epoch}
    return [place for _, place in found]


def noise_of(draws: list[Drawn]) -> set[bytes]:
    return {one.noise.tobytes() for one in draws}


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_batches_do_not_matter(batch: int) -> None:
    """However the sequence is cut, and whatever was drawn before, sample p is sample p."""
    expected = [key(draw(position)) for position in range(21)]
    firsts = list(range(0, 21, batch))
    found: dict[int, tuple[object, ...]] = {}
    for first in reversed(firsts):
        found |= {p: key(draw(p)) for p in range(first, min(first + batch, 21))}
    assert [found[position] for position in range(21)] == expected


def test_an_epoch_sees_every_sample() -> None:
    """Each image comes exactly `repeats` times, in an order that is no order."""
    for epoch in range(3):
        places = places_of(epoch)
        assert sorted(places) == list(range(EPOCH))
        seen = [draw(epoch * EPOCH + place).index for place in range(EPOCH)]
        assert sorted(seen) == sorted(list(range(COUNT)) * REPEATS)
        assert seen == [place % COUNT for place in places]
        assert places != list(range(EPOCH))


def test_epochs_differ() -> None:
    """Neither order nor noise of an epoch comes back in the next."""
    first, second = ([draw(e * EPOCH + i) for i in range(EPOCH)] for e in range(2))
    assert [one.index for one in first] != [one.index for one in second]
    assert len(noise_of(first + second)) == 2 * EPOCH
    assert len({one.uniform for one in first + second}) == 2 * EPOCH


def test_repeats_differ() -> None:
    """An image that an epoch sees twice gets noise of its own each time."""
    for image in range(COUNT):
        repeats = [one for one in map(draw, range(EPOCH)) if one.index == image]
        assert len(noise_of(repeats)) == REPEATS


def test_seeds_differ() -> None:
    """Another seed is another run."""
    first, second = ([draw(i, seed=seed) for i in range(EPOCH)] for seed in (7, 8))
    assert not noise_of(first) & noise_of(second)
    assert [one.index for one in first] != [one.index for one in second]


def test_dropout_has_its_rate_and_touches_nothing_else() -> None:
    """The share of empty captions is what was asked for; sample, noise and time stay."""
    draws = [draw(i, dropout=0.3) for i in range(4000)]
    # Four standard deviations.
    assert abs(sum(one.drop_caption for one in draws) / 4000 - 0.3) < 0.03
    none, all_ = ([draw(i, dropout=share) for i in range(50)] for share in (0.0, 1.0))
    assert not any(one.drop_caption for one in none)
    assert all(one.drop_caption for one in all_)
    assert [key(one)[:3] for one in none] == [key(one)[:3] for one in all_]


def test_draws_have_their_distributions() -> None:
    """Times are uniform in [0, 1), noise is standard normal and float32."""
    draws = [draw(i) for i in range(2000)]
    times = np.array([one.uniform for one in draws])
    noise = np.concatenate([one.noise.ravel() for one in draws])
    assert noise.dtype == np.float32
    assert 0 <= times.min() < times.max() < 1
    assert abs(times.mean() - 0.5) < 0.03
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02


def test_streams_are_apart() -> None:
    """One seed's order, samples and steps come from different streams, steps and ranks too."""
    firsts = {generator(7, stream, 3, 5).random() for stream in range(1, 9)}
    assert len(firsts) == 8
    seeds = [step_seed(7, step, rank) for step in range(20) for rank in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_random_stream_stays_what_it_is() -> None:
    """A change of these numbers changes every training: it may not come by accident."""
    assert places_of(0) == [1, 9, 2, 8, 5, 0, 4, 3, 7, 6]
    assert places_of(1) == [5, 1, 7, 3, 8, 4, 0, 2, 6, 9]
    one = draw(13)
    assert (one.index, one.drop_caption, one.uniform) == (3, True, 0.8428279753333358)
    noise = [0.7228628396987915, 0.043613046407699585, -1.3912558555603027]
    assert one.noise.ravel()[:3].tolist() == noise
    assert step_seed(7, 300, 1) == 3856372377825425898


def test_a_flip_changes_no_other_draw() -> None:
    """Half of the samples are mirror images; noise and caption are what they are without."""
    plain = [draw(position) for position in range(200)]
    flipped = [draw(position, random_flip=True) for position in range(200)]
    assert [key(one) for one in flipped] == [key(one) for one in plain]
    assert not any(one.flip for one in plain)
    assert 80 <= sum(one.flip for one in flipped) <= 120


def test_routes_are_orders_of_the_tokens_and_differ_by_sample_route_and_epoch() -> None:
    """The kept tokens come first, sorted; every token is as likely to be kept as another."""
    orders = [
        draw_routes(7, *order().place(position), kept=(10, 4), tokens=16) for position in range(400)
    ]
    for one in orders:
        assert (np.sort(one) == np.arange(16)).all()
        assert (np.diff(one[0, :10]) > 0).all()
        assert (np.diff(one[1, :4]) > 0).all()
    kept = {tuple(route[:4].tolist()) for one in orders[: 2 * EPOCH] for route in one}
    assert len(kept) > 3 * EPOCH
    shares = np.bincount(np.concatenate([one[0, :10] for one in orders]), minlength=16) / 400
    # Four standard deviations.
    assert np.abs(shares - 10 / 16).max() < 0.1
    assert (draw_routes(7, *order().place(3), kept=(10, 4), tokens=16) == orders[3]).all()
