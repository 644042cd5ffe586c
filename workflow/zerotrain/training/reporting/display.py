"""Training progress for the user: a bar in a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
STEPS_BEFORE_ESTIMATE = 5
SECONDS_BEFORE_ESTIMATE = 5.0
WORTH_AN_ESTIMATE = 60.0
"""Least remaining seconds for which the estimate is printed, once, on its own line."""


class Display:
    """Progress of one phase on stderr."""

    def __init__(self, name: str, step: int, until: int) -> None:
        self._name, self._until = name, until
        self._first = self._counted = step
        # The first step of a start is slower, so the pace is measured on the later ones.
        self._began = time.monotonic()
        self._last_line = 0.0
        self._estimated = False
        self._epoch = ""
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            from tqdm import tqdm  # plans format durations here, and need no bar

            self._bar = tqdm(initial=step, total=until, desc=name, unit=" steps", smoothing=0.1)

    def step(self, step: int, loss: float, lr: float) -> None:
        """Show one finished step."""
        now = time.monotonic()
        if step == self._first + 1:
            self._counted, self._began = step, now
        rate = (step - self._counted) / max(now - self._began, 1e-9)
        self._estimate(step, rate, now)
        figures = f"loss {loss:.4f}, lr {lr:.2e}{self._epoch}"
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(1)
            return
        if now - self._last_line < SECONDS_BETWEEN_LINES and step < self._until:
            return
        self._last_line = now
        pace = ""
        if step > self._counted:
            left = format_duration((self._until - step) / rate)
            pace = f", {format_rate(rate)}, " + (f"{left} left" if step < self._until else "done")
        self.say(f"{self._name}: step {step} of {self._until}, {figures}{pace}")

    def epoch(self, number: int, perplexity: float) -> None:
        """Take the perplexity of an epoch into what is shown; small data end several a second."""
        self._epoch = f", perplexity {perplexity:.4f} in epoch {number}"

    def _estimate(self, step: int, rate: float, now: float) -> None:
        early = step - self._counted < STEPS_BEFORE_ESTIMATE
        if self._estimated or early or now - self._began < SECONDS_BEFORE_ESTIMATE:
            return
        self._estimated = True
        left = (self._until - step) / rate
        if left >= WORTH_AN_ESTIMATE:
            end = datetime.now() + timedelta(seconds=left)
            day = "" if end.date() == datetime.now().date() else f"{end:%d %B}, "
            self.say(
                f"{self._name}: {self._until - step} steps to go at {format_rate(rate)} take about "
                f"{format_duration(left)}: until {day}{end:%H:%M}"
            )

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()


def format_duration(seconds: float) -> str:
    """Format a duration as 3:07 or 2:05:09."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(rate: float) -> str:
    """Format a rate as steps per second, or seconds per step if slower."""
    return f"{rate:.2f} steps/s" if rate >= 1 else f"{1 / rate:.2f} s/step"
