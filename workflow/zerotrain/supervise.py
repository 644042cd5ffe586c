"""A small parent for long commands: it copies their output, hands signals on, and leaves nothing.

The command runs in a process group of its own. Its output goes to our terminal as it comes (through
a pseudo-terminal where we have one, so that progress bars work) and into a log file. Launchers lose
signals and exit codes on the way to their children; this parent stands in for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from pathlib import Path
from types import FrameType

SUPERVISOR = "ZEROTRAIN_SUPERVISOR"
"""Environment variable with the pid of the supervising process."""
GRACE_SECONDS = 5.0
"""How long what a command left running may live on after it."""
SAME_SECONDS = 2.0
"""What arrives so soon after the first signal is the same request: a cluster signals a process, and
a launcher above it hands the same on."""
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask for an end."""
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)
"""What nohup or a shell's background job ignores stays ignored. A job's shell that ignores the
others does so to live until the training below it has written its checkpoint."""
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def supervise(
    command: Sequence[str],
    *,
    log: Path | None,
    environment: Mapping[str, str] | None = None,
    on_signal: Callable[[int], None] | None = None,
    last_lines: MutableSequence[str] | None = None,
) -> int:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        log: File for a copy of its output; appended to.
        environment: Its environment; default: ours.
        on_signal: Called at the first signal instead of handing it on to the process group; the
            second signal ends the group at once.
        last_lines: Takes the output's lines as they come; a deque keeps the last.

    Returns:
        The command's exit code; 128 + n where signal n ended it.
    """
    with contextlib.ExitStack() as stack:
        reading, writing = _output_channel()
        stack.callback(os.close, reading)
        sink = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = stack.enter_context(_Log(log))
        signals = _Signals(on_signal)
        stack.enter_context(handling_signals(signals))
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env={
                    # Threads that spin while they wait make a busy machine many times slower.
                    "OMP_WAIT_POLICY": "PASSIVE",
                    # Says at every import that torchvision, which nothing needs, is missing.
                    "TRANSFORMERS_VERBOSITY": "error",
                    **(environment or os.environ),
                    SUPERVISOR: str(os.getpid()),
                },
                start_new_session=True,
            )
        finally:
            os.close(writing)
        stack.callback(_signal_group, child.pid, signal.SIGKILL)
        signals.started(child.pid)
        copier = threading.Thread(target=_copy, args=(reading, sink, last_lines), daemon=True)
        copier.start()
        # Asked again and again: a wait without end misses what arrives as it begins, or elsewhere.
        code = child.wait(timeout=math.inf)
        # Whatever the command left running keeps its output open: end it, then read to the end.
        copier.join(timeout=GRACE_SECONDS)
        _signal_group(child.pid, signal.SIGKILL)
        copier.join(timeout=GRACE_SECONDS)
    return 128 - code if code < 0 else code


def heard() -> list[signal.Signals]:
    """The signals to listen to, of which some may be ignored on purpose."""
    return [
        number
        for number in HEARD
        if number not in LEFT_IGNORED or signal.getsignal(number) != signal.SIG_IGN
    ]


def unwind(number: int, frame: FrameType | None) -> None:
    """Handle a signal that asks for an end by unwinding the stack: what was begun is undone."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None] | int) -> Iterator[None]:
    """Handle signals that ask for an end, but for those that are ignored on purpose.

    Args:
        handler: A function such as `unwind`, or signal.SIG_IGN.
    """
    before = {number: signal.signal(number, handler) for number in heard()}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def end_with_parent() -> None:
    """End this process group when the process that started us, or the supervisor, is gone.

    Called by every supervised process. Launchers put their children into sessions of their own,
    where no signal to a group reaches them; a thread that looks twice a second does.
    """
    supervisor = int(os.environ.get(SUPERVISOR, "0"))
    if not supervisor:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and _runs(supervisor):
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _output_channel() -> tuple[int, int]:
    """A pair to read from and to write to: a pseudo-terminal where our own stderr is one."""
    if not sys.stderr.isatty():
        return os.pipe()
    reading, writing = pty.openpty()
    size = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
    return reading, writing


class _Log:
    """A log file that is given up, with a line, once it cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)  # what a full disk refused is not tried again

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        """Append bytes; nothing after the first failure."""
        if self._file.closed:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._file.close()
            with contextlib.suppress(OSError):
                text = f"{self._path}: its end is missing: {error.strerror}\n"
                os.write(sys.stderr.fileno(), text.encode())


def _copy(reading: int, log: _Log | None, lines: MutableSequence[str] | None) -> None:
    line = b""
    while True:
        try:
            data = os.read(reading, 65536)
        except OSError:
            # A pseudo-terminal whose last writer has gone answers so.
            break
        if not data:
            break
        # A terminal that is gone must not stop the command by an output that nobody takes away.
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), data)
        if log is not None or lines is not None:
            *whole, line = (line + data).split(b"\n")
            for item in map(_last_state, whole):
                if log is not None:
                    log.write(item + b"\n")
                if lines is not None:
                    lines.append(item.decode(errors="replace"))
            # A bar is one line for hours: what has been drawn over is not kept.
            line = line[max(0, line.rfind(b"\r", 0, -1)) :]
    if log is not None and line:
        log.write(_last_state(line) + b"\n")


def _last_state(line: bytes) -> bytes:
    """Of a line that was drawn over and over, what is seen at the end."""
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


class _Signals:
    """Hands the first signal on and answers the second with SIGKILL.

    It listens before the group exists and then makes up for what came too early.
    """

    def __init__(self, on_signal: Callable[[int], None] | None) -> None:
        self._on_signal = on_signal
        self._seen: list[int] = []
        self._first = 0.0
        self._group = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._seen and now - self._first <= SAME_SECONDS:
            return
        self._first = self._first or now
        self._seen.append(number)
        if self._group:
            self._answer()

    def started(self, group: int) -> None:
        """The process group to hand signals to."""
        self._group = group
        if self._seen:
            self._answer()

    def _answer(self) -> None:
        if len(self._seen) > 1:
            _signal_group(self._group, signal.SIGKILL)
        elif self._on_signal is not None:
            self._on_signal(self._seen[0])
        else:
            _signal_group(self._group, self._seen[0])


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in b"ZX"


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
