"""A small parent of long commands: it copies their output, forwards signals, leaves no process.

The command runs in its own process group. Its output goes directly to our terminal (through a
pseudo-terminal if we have one, so that progress bars work) and to a log file. Launchers lose
signals and exit codes on the way to their children; this parent replaces them.
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

from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.machine.output import LOG, TerminalOutput, print_message
from zerotrain.machine.pid_space import pid_space
from zerotrain.machine.regular_file import open_to_append

SUPERVISOR = "ZEROTRAIN_SUPERVISOR"
"""Environment variable with the mark of the supervising process: pid, start, Slurm job, machine."""
GRACE_SECONDS = 5.0
"""Seconds that processes left by a command have to end."""
SAME_SECONDS = 2.0
"""Signals within this time after the first are the same request: a cluster signals a process, and a
launcher above forwards its signal too."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a process to stop."""
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)
"""Signals that stay ignored if nohup or a shell's background job ignores them. A job's shell that
ignores the others does so to live until the training below it has written its checkpoint."""
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def supervise(
    command: Sequence[str],
    *,
    log: Path | None,
    environment: Mapping[str, str] | None = None,
    on_signal: Callable[[int], None] | None = None,
    last_lines: MutableSequence[str] | None = None,
) -> int:
    """Run a command until it ends.

    Args:
        command: Program and arguments.
        log: File for a copy of its output; appended to. Output of libraries then goes only to the
            file.
        environment: The command's environment; default: ours.
        on_signal: Called at the first signal instead of forwarding it to the process group; the
            second signal kills the group immediately.
        last_lines: Receives the output's lines; a deque keeps the last ones.

    Returns:
        The command's exit code; 128 + n if signal n ended it.

    Raises:
        FileError: a link, a folder, a pipe or a device is in the log's place.
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
                    # Otherwise every import warns that torchvision, which is not needed, is
                    # missing.
                    "TRANSFORMERS_VERBOSITY": "error",
                    **(environment or os.environ),
                    **({LOG: str(log.absolute())} if log is not None else {}),
                    SUPERVISOR: supervisor_mark(),
                },
                start_new_session=True,
            )
        finally:
            os.close(writing)
        stack.callback(_signal_group, child.pid, signal.SIGKILL)
        signals.started(child.pid)
        copier = threading.Thread(target=_copy, args=(reading, sink, last_lines), daemon=True)
        copier.start()
        # A wait without a timeout misses a signal that arrives as it starts.
        code = child.wait(timeout=math.inf)
        # Processes left by the command keep its output open: kill them, then read to the end.
        copier.join(timeout=GRACE_SECONDS)
        _signal_group(child.pid, signal.SIGKILL)
        copier.join(timeout=GRACE_SECONDS)
    return 128 - code if code < 0 else code


def handled_signals() -> list[signal.Signals]:
    """Return the signals to handle, without those that are deliberately ignored."""
    return [
        number
        for number in STOP_SIGNALS
        if number not in LEFT_IGNORED or signal.getsignal(number) != signal.SIG_IGN
    ]


def unwind(number: int, frame: FrameType | None) -> None:
    """Handle a stop signal by unwinding the stack, so that contexts clean up."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None] | int) -> Iterator[None]:
    """Handle stop signals, except for those that are deliberately ignored.

    Args:
        handler: A function such as `unwind`, or signal.SIG_IGN.
    """
    before = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def supervisor_mark() -> str:
    """Return the value of SUPERVISOR by which children recognise this process."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{os.getpid()}:{_start_of(os.getpid())}:{job}:{pid_space()}"


def supervisor_pid() -> int:
    """Return the pid of the process that supervises this one, running or ended; 0 if none does.

    A mark from another machine, container or Slurm job came here with a copied environment, as
    `sbatch --export=ALL` makes it: that process supervises others.
    """
    pid, *where = os.environ.get(SUPERVISOR, "").split(":", 3)
    if not pid.isdecimal():
        return 0
    if where and where[1:] != [os.environ.get("SLURM_JOB_ID", ""), pid_space()]:
        return 0
    return int(pid)


def end_with_parent() -> None:
    """End this process group when its parent process, or the supervisor, has ended.

    Every supervised process calls it. Launchers put their children into separate sessions, where no
    signal to a group reaches them; a thread checks twice per second instead.

    Raises:
        SystemExit: the supervisor has ended already. Only this process ends then: the variable may
            come from the shell that started it, whose group has other processes.
    """
    supervisor = supervisor_pid()
    if not supervisor:
        return
    parent, start = os.getppid(), os.environ[SUPERVISOR].split(":")[1:2]

    def runs() -> bool:
        found = _start_of(supervisor)
        return bool(found) and start in ([], [found])

    if not runs():
        print_message(
            PipelineError(
                f"the process that started this one, pid {supervisor}, has ended",
                hint=f"if you started this one yourself: `unset {SUPERVISOR}`, and again",
            )
        )
        raise SystemExit(EXIT_USER_ERROR)

    def watch() -> None:
        while os.getppid() == parent and runs():
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def end_with_supervisor() -> None:
    """End with the command of this package that started this process, if one did.

    What this process starts belongs to it alone, and does not know of that command.
    """
    if supervisor_pid() == os.getppid():
        end_with_parent()
    os.environ.pop(SUPERVISOR, None)


def _output_channel() -> tuple[int, int]:
    """Open a pipe, or a pseudo-terminal if stderr is a terminal: read end, write end."""
    if not sys.stderr.isatty():
        return os.pipe()
    reading, writing = pty.openpty()
    size = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
    return reading, writing


class _Log:
    """A log file that is abandoned, with a message, after the first failed write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_to_append(path)  # unbuffered: refused data is not written again

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        """Append bytes; ignore them after the first failure."""
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
    terminal = TerminalOutput() if log is not None else None
    while True:
        try:
            data = os.read(reading, 65536)
        except OSError:
            # A pseudo-terminal raises this after its last writer has closed it.
            break
        if not data:
            break
        _show(terminal.visible(data) if terminal else data)
        if log is not None or lines is not None:
            *whole, line = (line + data).split(b"\n")
            for item in map(_last_state, whole):
                if log is not None:
                    log.write(item + b"\n")
                if lines is not None:
                    lines.append(item.decode(errors="replace"))
            # A progress bar is one line for hours: discard overwritten states.
            line = line[max(0, line.rfind(b"\r", 0, -1)) :]
    if terminal:
        _show(terminal.rest())
    if log is not None and line:
        log.write(_last_state(line) + b"\n")


def _show(data: bytes) -> None:
    # If the terminal is gone, keep reading, so that the command does not block on its output.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), data)


def _last_state(line: bytes) -> bytes:
    """Return the visible end of a line that was repeatedly overwritten."""
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


class _Signals:
    """A signal handler that forwards the first signal and answers the second with SIGKILL.

    It listens before the group exists and then handles signals that came too early.
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
        """Set the process group that signals are forwarded to."""
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


def _start_of(pid: int) -> str:
    """Return when a running process started, in clock ticks since boot; empty for a zombie."""
    try:
        found = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return ""
    return "" if found[0] in (b"Z", b"X") else found[19].decode()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
