"""Commands in a pseudo-terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

HOME = "\x1b[H"
"""What begins each drawing of a whole screen."""
OTHER_SCREEN, OWN_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A zerotrain command on a terminal of its own.

    Args:
        words: The command's words.
        columns: Width.
        rows: Height.
        environment: Variables that are added.
    """

    def __init__(
        self, *words: object, columns: int = 80, rows: int = 24, **environment: str
    ) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        known = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        known.pop("COLUMNS", None), known.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zerotrain", *map(str, words)],
            stdin=follower, stdout=follower, stderr=follower, env={**known, **environment},
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(follower)
        self.output = ""
        self._rest = b""

    def wait_for(self, done: Callable[[str], bool], seconds: float = 60.0) -> None:
        """Read until the output fulfils a condition."""
        deadline = time.monotonic() + seconds
        while not done(self.output):
            assert time.monotonic() < deadline, self.output[-2000:]
            if not self._read():
                assert done(self.output), self.output[-2000:]

    def type(self, keys: bytes) -> None:
        """Type keys."""
        os.write(self._leader, keys)

    def end(self, seconds: float = 60.0) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + seconds
        while self._read() or self.process.poll() is None:
            assert time.monotonic() < deadline, self.output[-2000:]
        os.close(self._leader)
        return self.process.wait()

    def screens(self) -> list[list[str]]:
        """Return the lines of each drawing of the whole screen, without colours."""
        drawn = self.output.partition(OTHER_SCREEN)[2].partition(OWN_SCREEN)[0].split(HOME)[1:]
        return [_SEQUENCES.sub("", one).replace("\r", "").split("\n") for one in drawn]

    def _read(self) -> bool:
        if not select.select([self._leader], [], [], 0.1)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._leader, 65536)
        except OSError:  # the command has closed its side
            return False
        self._rest += data
        text = self._rest.decode(errors="ignore")
        self._rest = b"" if text.encode() == self._rest else self._rest
        if not self._rest:
            self.output += text
        return True


def start_stand_in(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that does nothing, in place of a training."""
    return subprocess.Popen(["sleep", "600"], cwd=folder, start_new_session=True)
