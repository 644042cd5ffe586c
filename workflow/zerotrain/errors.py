"""Errors that a user can fix, and the exit codes of the command line."""

import re

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Control characters, and marks that turn the direction of the text after them."""

MOST_LETTERS = 200
"""Of a value in a message: longer ones are cut in the middle."""
MOST_MESSAGE, MOST_WHAT, LEAST_HINT = 960, 820, 140
"""Letters of a message without its headings, of what is wrong, and of the hint, which has the
rest."""
LETTERS_OF_MORE = 40
"""Of the line that counts those which are left out."""
_LONG = re.compile(
    rf"'[^'\n]{{{MOST_LETTERS},}}'|\"[^\"\n]{{{MOST_LETTERS},}}\"|[^\s/]{{{MOST_LETTERS},}}"
)

EXIT_USER_ERROR = 2
"""Something the user can fix: configuration, input data, a folder that is missing or in use."""

EXIT_UNFINISHED = 85
"""Training stopped on request; a checkpoint was written and the next start resumes from it."""


def show_controls(text: str) -> str:
    r"""Escape control characters of file names, captions and other foreign text, as \x1b.

    A terminal would act on them: clear, rename its window, write the clipboard. Line ends and tabs
    stay.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def shorten(text: str, most: int) -> str:
    """Cut what is too long for a message: values and lines in their middle, lists at their end.

    Args:
        text: The message.
        most: Letters of all lines together.
    """
    if len(text) <= min(MOST_LETTERS, most):
        return text
    short = [
        _LONG.sub(lambda found: _cut(found[0], MOST_LETTERS), line) for line in text.split("\n")
    ]
    if sum(map(len, short)) + len(short) <= most:
        return "\n".join(short)
    lines, room = [_cut(line, most - LETTERS_OF_MORE) for line in short], most - LETTERS_OF_MORE
    kept = 0
    while kept < len(lines) and (room := room - len(lines[kept]) - (kept > 0)) >= 0:
        kept += 1
    more = [f"  ... and {len(lines) - kept:,} more lines"] if kept < len(lines) else []
    return "\n".join(lines[:kept] + more)


def _cut(text: str, most: int) -> str:
    """Cut a text in its middle."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 5]} ... {text[-end:]}"


class PipelineError(Exception):
    """A mistake that a user can fix; printed as one ERROR and one Hint, without a traceback.

    Args:
        what: What is wrong, with the value found and where (file, key or sample).
        hint: What to do next.
    """

    def __init__(self, what: str, *, hint: str) -> None:
        super().__init__(what)
        self.what = shorten(show_controls(what), MOST_WHAT)
        self.hint = shorten(show_controls(hint), max(LEAST_HINT, MOST_MESSAGE - len(self.what)))

    def __str__(self) -> str:
        return f"ERROR: {self.what}\n  Hint: {self.hint}"


def device_out_of_memory(where: str, error: Exception, *, hint: str) -> PipelineError:
    """torch's OutOfMemoryError as a sentence: its figures, without the allocator's advice."""
    message = " ".join(str(error).split()).partition(" Of the allocated")[0]
    return PipelineError(f"{where}: the device ran out of memory: {message}", hint=hint)
