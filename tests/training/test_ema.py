"""The moving average of the weights (EMA_SLOT): that of diffusers, under every engine."""

from __future__ import annotations

import pytest
import torch
from diffusers.training_utils import EMAModel

from zerotrain.state.position import EMA_SLOT, MASTER
from zerotrain.training.engines.ema import decay

STEPS, HIGHEST = 6, 0.3
"""The rising decay reaches the highest at step 4."""
CASES = [("torch", 2), ("zero2_offload", 2), ("zero3_offload", 1)]


def masters(training, name: str, step: int) -> list[torch.nn.Parameter]:
    found = training.checkpoint(name, step)
    return [torch.nn.Parameter(found.tensor(n, MASTER)) for n in found.names]


def of_diffusers(training, name: str, start: list[torch.nn.Parameter], steps) -> list[torch.Tensor]:
    """What EMAModel makes of the master weights that each step has left."""
    average = EMAModel(start, decay=HIGHEST)
    for step in steps:
        average.step(masters(training, name, step))
    return average.shadow_params


def test_average_decay_rises_as_diffusers_does():
    """The decay of every step is EMAModel's."""
    average = EMAModel([torch.nn.Parameter(torch.zeros(1))], decay=0.99)
    for step in range(1, 2000):
        assert decay(step, 0.99) == average.get_decay(step)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "processes"), CASES)
def test_average_is_that_of_diffusers(training, preset, processes):
    """Every element, whatever process holds it."""
    training.run(
        "a", preset, STEPS, num_processes=processes, use_ema=True, ema_decay=HIGHEST,
        save_every=1, keep=STEPS,
    )  # fmt: skip
    first = masters(training, "a", 1)  # at the first step the average is what the step has left
    expected = of_diffusers(training, "a", first, range(1, STEPS + 1))
    found = training.checkpoint("a", STEPS)
    assert found.slots[-1] == EMA_SLOT
    for name, tensor in zip(found.names, expected, strict=True):
        torch.testing.assert_close(found.tensor(name, EMA_SLOT), tensor, rtol=1e-6, atol=1e-8)
        assert not torch.equal(found.tensor(name, EMA_SLOT), found.tensor(name, MASTER))


@pytest.mark.slow
def test_average_leaves_the_training_alone(training):
    """The weights are those of a training without an average, and so are the losses."""
    plain = training.run("plain", "torch", STEPS)
    assert training.run("averaged", "torch", STEPS, use_ema=True) == plain
    a, b = training.checkpoint("plain", STEPS), training.checkpoint("averaged", STEPS)
    assert a.slots == [slot for slot in b.slots if slot != EMA_SLOT]
    assert all(torch.equal(a.tensor(n, MASTER), b.tensor(n, MASTER)) for n in a.names)


@pytest.mark.slow
def test_average_crosses_every_switch(training):
    """Engine, stage and processes: with two processes within 1e-5, as the losses do."""
    values = {"use_ema": True, "ema_decay": 0.9, "lr_scheduler_steps": 16}
    training.run("whole", "torch", 8, **values)
    state = None
    for number, (preset, processes) in enumerate(
        [("torch", 1), ("zero2_offload", 2), ("zero3_offload", 1), ("torch", 2)]
    ):
        name, until = f"phase{number}", 2 * number + 2
        training.run(name, preset, until, num_processes=processes, state=state, **values)
        state = training.export_state(name, until)
    whole, switched = training.checkpoint("whole", 8), training.checkpoint("phase3", 8)
    for name in whole.names:
        expected = whole.tensor(name, EMA_SLOT)
        assert (switched.tensor(name, EMA_SLOT) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.slow
def test_average_may_begin_later(training):
    """In a phase that turns it on it begins with the weights that the phase starts from."""
    training.run("before", "torch", 3)
    state = training.export_state("before", 3)
    training.run("after", "zero2_offload", 4, state=state, use_ema=True, ema_decay=0.2)
    start, end = masters(training, "before", 3), training.checkpoint("after", 4)
    for name, first in zip(end.names, start, strict=True):
        expected = 0.2 * first.detach() + 0.8 * end.tensor(name, MASTER)
        torch.testing.assert_close(end.tensor(name, EMA_SLOT), expected, rtol=1e-6, atol=1e-8)


def test_average_at_intervals(training):
    """Between updates it stays, and an update takes its share of the weights."""
    values = {"use_ema": True, "ema_decay": HIGHEST, "ema_update_interval": 2}
    training.run("a", "torch", 5, **values, save_every=1, keep=5)
    found = [training.checkpoint("a", step) for step in (2, 3, 4, 5)]
    name = found[0].names[0]
    two, three, four, five = (one.tensor(name, EMA_SLOT) for one in found)
    assert torch.equal(two, three)
    assert torch.equal(four, five)
    moved = three.lerp(found[2].tensor(name, MASTER), 1 - decay(4, HIGHEST))
    torch.testing.assert_close(four, moved, rtol=1e-6, atol=1e-8)
    assert not torch.equal(three, four)
