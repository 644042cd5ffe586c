"""Which of a model's own parameters the patterns of a configuration leave as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zerotrain.errors import PipelineError


def is_frozen(
    name: str, frozen_parameters: Sequence[str], trainable_parameters: Sequence[str]
) -> bool:
    """Return whether a parameter stays as the base has it.

    Args:
        name: The parameter's.
        frozen_parameters: Regular expressions; what contains one stays.
        trainable_parameters: The same; if there are some, what contains none stays, too.
    """
    chosen = not trainable_parameters or _fits(trainable_parameters, name)
    return not chosen or _fits(frozen_parameters, name)


def check_pattern_matches(key: str, pattern: str, names: Sequence[str]) -> None:
    """Check that a pattern matches a name: a typing error would change what is trained, unseen.

    Args:
        key: The configuration's key.
        pattern: A regular expression of it.
        names: Names of all parameters.

    Raises:
        PipelineError: it fits none; some names are shown.
    """
    if not any(re.search(pattern, name) for name in names):
        raise PipelineError(
            f"{key}: {pattern!r} is in the name of none of the {len(names)} parameters",
            hint=f"names look like {', '.join(list(names)[:3])}",
        )


def _fits(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
