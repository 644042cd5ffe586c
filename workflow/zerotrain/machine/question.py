"""Questions on the terminal before something is lost; a script never answers one by accident."""

from __future__ import annotations

import sys

from zerotrain.errors import PipelineError

YES = ("y", "yes")


def confirm(context: str, question: str, unanswered: PipelineError) -> bool:
    """Ask on the terminal, and return whether the answer is yes; nothing is the same as no.

    Args:
        context: What the user has to know to answer.
        question: The question.
        unanswered: Raised if standard input is no terminal.

    Raises:
        PipelineError: `unanswered`.
    """
    if not sys.stdin.isatty():
        raise unanswered
    print(context, file=sys.stderr)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in YES
