"""Which of a model's own parameters the patterns of a configuration leave as they are."""

from __future__ import annotations

from collections.abc import Sequence

from zerotrain.errors import PipelineError

SECONDS = 1.0
"""Limit of one search. A name has some hundred characters; only a pattern whose repetitions can
share them in exponentially many ways takes longer, and then it can take years."""


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
        PipelineError: it fits none; some names are shown. Or a search takes too long.
    """
    if not any(matches(pattern, name) for name in names):
        raise PipelineError(
            f"{key}: {pattern!r} is in the name of none of the {len(names)} parameters",
            hint=f"names look like {', '.join(list(names)[:3])}",
        )


def matches(pattern: str, name: str, *, whole: bool = False) -> bool:
    """Return whether a name contains a pattern.

    Args:
        pattern: A regular expression, which may be another person's.
        name: The name of a parameter or of a layer.
        whole: The pattern is to be the whole name.

    Raises:
        PipelineError: the search takes longer than SECONDS.
    """
    import regex  # as in zerotrain.config.trained_part

    search = regex.fullmatch if whole else regex.search
    try:
        return search(pattern, name, timeout=SECONDS) is not None
    except TimeoutError:
        raise PipelineError(
            f"{pattern!r}: looking for it in the name {name!r} takes longer than {SECONDS:g} s",
            hint="a repetition in a repetition, such as (a+)+, tries exponentially many ways; "
            "write it without one",
        ) from None


def _fits(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)
