"""Which of a model's own parameters the patterns of a configuration leave as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence


def is_frozen(
    name: str, frozen_parameters: Sequence[str], trainable_parameters: Sequence[str]
) -> bool:
    """Whether a parameter stays as the base has it.

    Args:
        name: The parameter's.
        frozen_parameters: Regular expressions; what contains one stays.
        trainable_parameters: The same; if there are some, what contains none stays, too.
    """
    chosen = not trainable_parameters or _fits(trainable_parameters, name)
    return not chosen or _fits(frozen_parameters, name)


def _fits(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
