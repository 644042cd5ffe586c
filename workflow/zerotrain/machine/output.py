"""Output of a stage: messages, and output that goes only to its log: details and libraries' lines.

Libraries' lines come from processes, threads and C++ code that our settings do not reach, so they
are recognised by their beginning. Unrecognised lines are shown.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TextIO

from zerotrain.errors import PipelineError, show_controls
from zerotrain.machine.regular_file import open_to_append

LOG = "ZEROTRAIN_LOG"
"""Environment variable with the file to which the supervisor copies the stage's output."""
_RANK = rb"(?:\[rank\d+\]:? ?)?"
_RECORDS = (
    rb"\[\d{4}-\d\d-\d\d [\d:,.]+\] \[(?:DEBUG|INFO|WARNING)\] \[\w+\.py:\d+:"  # DeepSpeed
    rb"|\[?W\d{4} \d\d:\d\d:\d\d"  # torch, C++ and Python
)
_STARTS = (
    b"[Gloo] Rank ",
    # DeepSpeed, compiling or loading its ops
    b"DeepSpeed deepspeed.ops.",
    b"Adam Optimizer #",
    b"Config: alpha=",
    b"Loading extension module ",
    b"Building extension module ",
    b"Emitting ninja build file ",
    b"Detected CUDA files, patching ldflags",
    b"ninja: no work to do",
    # bars of transformers and diffusers
    b"Writing model shards: ",
    b"Loading pipeline components",
    b"Loading checkpoint shards: ",
    b"Loading weights: ",
)
_WARNING = rb"\S+\.py:\d+: \w*Warning: "  # Python's warnings
_LITERAL = b"|".join(map(re.escape, _STARTS))
_HIDDEN = re.compile(_RANK + b"(?:" + b"|".join([_RECORDS, _LITERAL, _WARNING]) + b")")
_PYTHON_WARNING = re.compile(_RANK + _WARNING)
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_PARTS = re.compile(rb"[^\r\n]*[\r\n]|[^\r\n]+")
_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")
_BARS = re.compile(r"(\r|\x1b\[[0-9;]*[mAK])")
"""What our own output holds: colours; on stderr also the returns and deletions of bars."""
_SHORT = 120
"""Number of bytes in which a record or a warning can be recognised."""


class TerminalOutput:
    """A filter of a stage's output that hides libraries' lines, for pieces of any size."""

    def __init__(self) -> None:
        self._held = b""
        self._returned = b""
        self._in_line = False
        self._hid_return = False
        self._source_line = False

    def visible(self, data: bytes) -> bytes:
        """Return what the terminal shows of this piece; the start of a line may be held back.

        Args:
            data: The bytes that were read.
        """
        shown = []
        parts = _PARTS.findall(self._held + data)
        self._held = b""
        for part in parts:
            if part == b"\r" and not self._in_line:
                self._returned = part  # bars begin with it, including libraries'
                continue
            whole = part[-1:] in b"\r\n"
            if self._in_line:
                shown.append(part)
                self._in_line = not whole
                self._hid_return = self._source_line = False
            elif not whole and self._may_be_hidden(part):
                self._held = part
            elif whole and self._is_hidden(part):
                self._returned = b""
            else:
                shown += [self._returned, part]
                self._returned = b""
                self._in_line = not whole
        return b"".join(shown)

    def rest(self) -> bytes:
        """Return the rest that was held back at the end of the output, unless it is hidden."""
        held, self._held = self._returned + self._held, b""
        return b"" if _HIDDEN.match(_CONTROL.sub(b"", held.lstrip(b"\r"))) else held

    def _may_be_hidden(self, part: bytes) -> bool:
        text = _CONTROL.sub(b"", part)
        is_start = any(start.startswith(text) for start in _STARTS)
        if self._source_line and text[:1] in b" ":
            return True
        return is_start or bool(_HIDDEN.match(text)) or (text[:1] in b"[/W" and len(text) < _SHORT)

    def _is_hidden(self, part: bytes) -> bool:
        text = _CONTROL.sub(b"", part)
        if not text.strip():
            return self._hid_return and text == b"\n"  # a terminal ends lines with \r\n
        source_line = self._source_line and text.startswith(b"  ")
        self._source_line = not source_line and bool(_PYTHON_WARNING.match(text))
        hidden = source_line or bool(_HIDDEN.match(text))
        self._hid_return = hidden and part.endswith(b"\r")
        return hidden


def escape_foreign_controls(stream: TextIO, *, bars: bool) -> None:
    """Let a stream write no control characters of foreign text; see errors.show_controls.

    Args:
        stream: stdout or stderr.
        bars: Whether bars are drawn on it.
    """
    write, own = stream.write, _BARS if bars else _COLOURS

    def write_visible(text: str) -> int:
        # Every second part is our own.
        parts = own.split(text)
        parts[::2] = map(show_controls, parts[::2])
        return write("".join(parts))

    stream.write = write_visible  # type: ignore[method-assign]


def print_message(message: object) -> None:
    """Print a message or an error to stderr, unbuffered, with visible control characters."""
    print(show_controls(str(message)), file=sys.stderr, flush=True)


def print_detail(text: str) -> None:
    """Append a line to the stage's log; print it if there is no log, or its disk is full."""
    text = show_controls(text)
    if log := os.environ.get(LOG):
        try:
            with open_to_append(Path(log)) as stream:
                stream.write(f"{text}\n".encode())
            return
        except OSError:
            pass
    print_message(text)


def format_figure(value: float) -> str:
    """Format a figure: large ones as 37,700, others with four digits."""
    whole = isinstance(value, int) or 10_000 <= abs(value) < 10**9
    return f"{value:,.0f}" if whole else f"{value:.4g}"


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
