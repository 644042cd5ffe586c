"""Shares: images that take part in a part of an epoch, such as every second one of a source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def exact_share(share: float) -> Fraction:
    """Return repeats as they were written: 0.1 is a tenth."""
    return Fraction(str(share))


def epoch_part(shares: Mapping[float, int]) -> int:
    """Count the samples that an epoch has of images with shares, of which so many have each."""
    found = round(sum(exact_share(share) * count for share, count in shares.items()))
    return max(1, found) if shares else 0


def count_epoch(repeats: NDArray[Any], shares: NDArray[Any], times: int) -> int:
    """Count the samples of an epoch: the train split with its repeats and the dataset's.

    Args:
        repeats: [N] repeats of each training sample.
        shares: [N] share of an epoch in which each takes part.
        times: Repeats of the dataset.
    """
    whole = int(repeats[shares == 1].sum()) * times
    return whole + epoch_part(Counter(shares[shares != 1].tolist()))
