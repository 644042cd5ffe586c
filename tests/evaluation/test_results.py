"""What an evaluation takes where the configuration names nothing."""

from __future__ import annotations

from zerotrain.evaluation.results import spread


def test_a_few_of_many_are_evenly_spaced():
    """Not the first ones; all of them, in their order, where there are not more."""
    files = [f"{subject} {number}" for subject in ("cat", "dog") for number in range(50)]
    assert spread(files, 4) == ["cat 0", "cat 25", "dog 0", "dog 25"]
    assert spread(files[:10], 10) == files[:10]
    assert spread(files[:3], 10) == files[:3]
    assert spread([], 10) == []
