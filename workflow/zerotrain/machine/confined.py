"""Calls of code from others, in a child process with limits of time and memory for each call."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from zerotrain.errors import PipelineError

SECONDS = 4
LETTERS_PER_SECOND = 2**18
"""A longer text has more time: an honest call reads it once."""
MEMORY = 2**30
"""Bytes that a call may take."""
OUT_OF_MEMORY = 3
"""Exit code of a child."""
STDERR = 2
"""Number of the last of the files that a fork keeps."""
RETURNED, RAISED = b"1", b"0"
"""First byte of an answer."""


class RaisedError(Exception):
    """The function raised; the text is that of its error."""


class Confined:
    """A function of texts, called in a fork of the process that calls it.

    The fork waits for the next call. It has a limit of address space and an alarm, which ends it in
    any code; the next call has a new one. One thread calls at a time.

    Args:
        call: Takes no lock that another thread can hold, since only this thread is in the fork.
        what: What is called, for messages.
        seconds: Limit of a call.
    """

    def __init__(self, call: Callable[[str], str], what: str, *, seconds: float = SECONDS) -> None:
        self._call, self._what, self._seconds = call, what, seconds
        self._caller = self._child = 0
        self._pipe: Connection | None = None

    def __call__(self, given: str) -> str:
        """Call the function.

        Raises:
            PipelineError: the call takes more time or memory than its limits.
            RaisedError: the function raised an error.
        """
        if self._pipe is None or self._caller != os.getpid():  # a fork of the caller has its own
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(given.encode("utf-8", "surrogatepass"))
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._ended() from None
        except BaseException:
            self.close()  # its answer would be taken for that to the next call
            raise
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] == RAISED:
            raise RaisedError(text)
        return text

    def close(self) -> None:
        """End the child, if this process has one."""
        if self._pipe is not None and self._caller == os.getpid():
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        self._drop()

    def _start(self) -> None:
        self._drop()
        self._pipe, its = Pipe()
        self._caller = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            try:
                _replace_files(besides=its.fileno())
                self._serve(its)
            finally:
                os._exit(1)
        its.close()

    def _serve(self, pipe: Connection) -> None:
        """Answer calls until the caller ends."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides, and ends this with it
        while True:
            try:
                given = pipe.recv_bytes().decode("utf-8", "surrogatepass")
            except (EOFError, OSError):
                return
            seconds = self._seconds + len(given) / LETTERS_PER_SECOND
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                with _limit_of_memory():
                    answer = RETURNED + self._call(given).encode("utf-8", "surrogatepass")
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            except Exception as error:
                text = str(error) or type(error).__name__
                answer = RAISED + text.encode("utf-8", "surrogatepass")
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send_bytes(answer)

    def _ended(self) -> PipelineError:
        """Return the error of a child that has ended in a call."""
        _, status = os.waitpid(self._child, 0)
        self._drop()
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            end = f"takes more than {self._seconds:g} s"
        elif code == OUT_OF_MEMORY:
            end = f"takes more than {MEMORY // 2**30} GiB of memory"
        else:
            end = f"ended its process (exit code {code})"
        return PipelineError(
            f"the {self._what} {end}",
            hint="it is damaged or made to harm; take the one that the model was published with",
        )

    def _drop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None


def _replace_files(besides: int) -> None:
    """Put /dev/null in the place of every file that a fork has from its caller.

    A lock of the caller's would outlive it in the fork's copy of its file. To close the copies is
    not enough: a file that the fork opens would get the number of one, and be closed when the
    caller's object is collected.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > STDERR and number not in (null, besides):
            os.dup2(null, number)


@contextlib.contextmanager
def _limit_of_memory() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = pages * resource.getpagesize() + MEMORY
    limit = taken if soft == resource.RLIM_INFINITY else min(taken, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
