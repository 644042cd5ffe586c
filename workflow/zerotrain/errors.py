"""Errors that a user can fix, and the exit codes of the command line."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

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


class PipelineError(Exception):
    """A mistake that a user can fix; printed as one ERROR and one Hint, without a traceback.

    Args:
        what: What is wrong, with the value found and where (file, key or sample).
        hint: What to do next.
    """

    def __init__(self, what: str, *, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return show_controls(f"ERROR: {self.what}\n  Hint: {self.hint}")


def device_out_of_memory(where: str, error: Exception, *, hint: str) -> PipelineError:
    """torch's OutOfMemoryError as a sentence: its figures, without the allocator's advice."""
    message = " ".join(str(error).split()).partition(" Of the allocated")[0]
    return PipelineError(f"{where}: the device ran out of memory: {message}", hint=hint)
