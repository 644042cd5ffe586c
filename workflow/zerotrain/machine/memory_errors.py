"""The host's memory is used up, or limited: libraries report it in errors of any class.

Whatever turns a library's errors into a sentence about a file asks here first: a whole file that
does not fit the memory is not damaged.
"""

from __future__ import annotations

import re

WORDS = re.compile(
    r"can't allocate memory|Cannot allocate memory|std::bad_alloc|"
    r"Unable to allocate .* for an array|failed to map segment from shared object"
)
"""What the system, torch, C++ and numpy say. The last is a library that is loaded."""


def find_out_of_memory(error: BaseException | None) -> str | None:
    """Return the message of the error, or of one that it was raised from, that is about memory."""
    while error is not None:
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError) or WORDS.search(message):
            return message
        error = error.__cause__ or error.__context__
    return None
