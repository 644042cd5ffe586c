"""Means of the log: of the steps since the last line, and of a whole epoch."""

from __future__ import annotations

import json
import math

import pytest

from zerotrain.training.reporting.log import Means

EPOCH, BATCH = 10, 4


def feed(means: Means, first: int, last: int) -> dict[int, float]:
    """Steps with losses 1 / step; the epochs that ended, with their means."""
    found = {}
    for step in range(first, last + 1):
        means.add(1 / step, float(step))
        if ended := means.epoch_loss(step * BATCH, BATCH):
            found[ended[0]] = ended[1]
    return found


def mean(first: int, last: int) -> float:
    """The mean of these losses, added in their order."""
    total = 0.0
    for step in range(first, last + 1):
        total += 1 / step
    return total / (last - first + 1)


def test_an_epoch_ends_with_the_step_that_reaches_its_end() -> None:
    """Of 10 samples by 4 the first epoch has steps 1 to 3, the second 4 and 5, and so on: each step
    counts once."""
    assert feed(Means(0, EPOCH), 1, 8) == {1: mean(1, 3), 2: mean(4, 5), 3: mean(6, 8)}


@pytest.mark.parametrize("cut", range(1, 8))
def test_means_continue_from_a_checkpoint_to_the_last_bit(cut: int) -> None:
    """Whatever step a training is cut at, the line after it and every epoch are those of an
    undisturbed one."""
    whole = Means(0, EPOCH)
    expected = feed(whole, 1, 8)
    first = Means(0, EPOCH)
    found = feed(first, 1, cut)
    second = Means(cut * BATCH, EPOCH)
    second.load(json.loads(json.dumps(first.state())), same_phase=True)
    assert found | feed(second, cut + 1, 8) == expected
    assert second.take() == whole.take()


def test_a_phase_that_begins_amid_an_epoch_has_its_own_line_but_the_runs_epoch() -> None:
    """The first line of a phase is of its own steps; the epoch has those of the phase before."""
    before = Means(0, EPOCH)
    feed(before, 1, 4)
    after = Means(16, EPOCH)
    after.load(before.state(), same_phase=False)
    assert feed(after, 5, 5) == {2: mean(4, 5)}
    assert after.take()["loss"] == 1 / 5


def test_an_epoch_that_began_in_another_program_has_no_mean() -> None:
    """Without the steps before there would be a number of another meaning."""
    assert feed(Means(16, EPOCH), 5, 8) == {3: mean(6, 8)}


def test_steps_that_fp16_left_out_are_counted_and_not_averaged() -> None:
    """An infinite norm is no part of the mean; a line of such steps alone has none."""
    means = Means(0, EPOCH)
    means.add(1.0, 2.0)
    means.add(3.0, math.inf)
    assert means.take() == {"loss": 2.0, "grad_norm": 2.0, "skipped": 1}
    means.add(3.0, math.inf)
    assert means.take() == {"loss": 3.0, "grad_norm": None, "skipped": 1}
