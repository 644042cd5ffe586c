"""How often a checkpoint is saved, as people write it."""

from __future__ import annotations

import pytest

from zerotrain.config.save_interval import minutes, read_interval


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (500, 500), ("500", 500), ("1e3", 1000), ("20 steps", 20), ("1 step", 1),
        ("30 min", "30 min"), ("30m", "30 min"), ("30 minutes", "30 min"), ("2 h", "120 min"),
        ("1.5 hours", "90 min"), ("90 s", "1.5 min"), ("10 sec.", "0.166667 min"),
    ],
)  # fmt: skip
def test_an_interval_is_steps_or_minutes(given: object, kept: int | str) -> None:
    """A time is kept in minutes, whatever unit it was given in, and is itself valid again."""
    assert read_interval(given) == kept
    assert read_interval(kept) == kept
    assert minutes(read_interval(given)) == (
        None if isinstance(kept, int) else float(kept.removesuffix(" min"))
    )


@pytest.mark.parametrize(
    "given", [0, -5, 1.5, True, "0 min", "min", "ten", "5 days", "30 min 10 s", "", None]
)
def test_what_is_neither_is_refused(given: object) -> None:
    """Nothing, no number, half a step."""
    with pytest.raises(ValueError, match='"30 min"'):
        read_interval(given)
