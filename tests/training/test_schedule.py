"""The learning rate is a function of the global step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from zerotrain.training.schedule import learning_rate


@dataclass
class Settings:
    """What the schedule looks at."""

    lr_scheduler: str
    warmup: int = 0
    learning_rate: float = 1e-3

    def warmup_steps(self, horizon: int) -> int:
        return self.warmup


def rates(lr_scheduler: str, warmup: int, horizon: int, steps: int) -> list[float]:
    """The rates of the first steps."""
    settings = Settings(lr_scheduler, warmup)
    return [learning_rate(settings, step, horizon) for step in range(steps)]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warmup_rises_to_the_peak(name: str) -> None:
    """The first step is not lost to a rate of zero, and the last of the warm-up has the peak."""
    assert rates(name, 4, 100, 4) == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3], rel=1e-12)
    assert rates(name, 0, 100, 1) == [1e-3]


def test_constant_stays() -> None:
    """Beyond the horizon too."""
    assert set(rates("constant", 0, 10, 30)) == {1e-3}


def test_linear_falls_to_zero_at_the_horizon() -> None:
    """By equal steps from the end of the warm-up, and it stays there."""
    expected = [0.5e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0.0, 0.0]
    assert rates("linear", 2, 6, 8) == pytest.approx(expected, abs=1e-18)


def test_cosine_falls_to_zero_at_the_horizon() -> None:
    """Half a cosine: 1, 0.854, 0.5, 0.146, 0 at the quarters."""
    half = math.sqrt(0.5)
    shares = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0]
    assert rates("cosine", 0, 4, 6) == pytest.approx([1e-3 * s for s in shares], abs=1e-18)


def test_a_schedule_of_warmup_alone_ends() -> None:
    """A horizon at the end of the warm-up divides nothing by zero."""
    assert rates("cosine", 3, 3, 5) == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 0])
