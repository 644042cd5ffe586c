"""A first call of code from others, in a child process with limits of time and memory."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from zerotrain.errors import PipelineError

SECONDS = 4
MEMORY = 2**30
"""Bytes that the call may take."""
OUT_OF_MEMORY = 3
"""Exit code of a child."""


def try_out(call: Callable[[], object], what: str, *, seconds: int = SECONDS) -> None:
    """Call a function in a fork of this process; what it returns or raises is dropped.

    The fork has a limit of address space and an alarm, which ends it in any code.

    Args:
        call: Takes no lock that another thread can hold, since only this thread is in the fork.
        what: What is tried, for the message.
        seconds: Limit of the call.

    Raises:
        PipelineError: the call takes more time or memory than its limits.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            call()
            code = 0
        except MemoryError:
            code = OUT_OF_MEMORY
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        limit_text = f"{seconds} s"
    elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == OUT_OF_MEMORY:
        limit_text = f"{MEMORY // 2**30} GiB of memory"
    else:
        return
    raise PipelineError(
        f"the {what} takes more than {limit_text}",
        hint="it is damaged or made to harm; take the one that the model was published with",
    )
