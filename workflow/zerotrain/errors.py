"""Errors that a user can fix, and the exit codes of the command line."""

EXIT_USER_ERROR = 2
"""Something the user can fix: configuration, input data, a folder that is missing or in use."""

EXIT_UNFINISHED = 85
"""Training stopped on request; a checkpoint was written and the next start resumes from it."""


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
        return f"ERROR: {self.what}\n  Hint: {self.hint}"


def device_out_of_memory(where: str, error: Exception, *, hint: str) -> PipelineError:
    """torch's OutOfMemoryError as a sentence: its figures, without the allocator's advice."""
    message = " ".join(str(error).split()).partition(" Of the allocated")[0]
    return PipelineError(f"{where}: the device ran out of memory: {message}", hint=hint)
