"""metrics.jsonl as it grows: the newest line, the pace, and a loss curve of few points."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from zerotrain.artifact.documents import DocumentError, check_object, parse_json
from zerotrain.artifact.layout import LOG as LOG
from zerotrain.machine.regular_file import open_to_read

WHOLE_BYTES = 4 * 2**20
"""Size up to which a log is read as a whole: about 9,000 lines."""
TAIL_BYTES = 2**18
"""End of a longer log that is read as a whole; of the lines before it only some are read."""
SAMPLED_LINES = 400
LONGEST_LINE = 2**14
"""Bytes of a line of about 600 processes, which has the memory of each."""
MOST_POINTS = 2000
"""An even number."""
PACE_LINES = 20
"""Number of the newest lines over which the pace is measured."""
SECONDS = "seconds_"


class Curve:
    """Values by step, at most MOST_POINTS: of more, each point is the mean of 2, 4, ... values."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._each = self._in_last = 1
        """Values of a point, and of the last one so far."""

    def add(self, step: int, value: float) -> None:
        """Add a value; a step that was there before begins the curve again from that step."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
            self._in_last = self._each
        if self.points and self._in_last < self._each:
            self._in_last += 1
            mean = self.points[-1][1]
            self.points[-1] = step, mean + (value - mean) / self._in_last
            return
        self.points.append((step, value))
        self._in_last = 1
        if len(self.points) > MOST_POINTS:
            pairs = zip(self.points[:-1:2], self.points[1:-1:2], strict=True)
            self.points = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs] + self.points[-1:]
            self._each *= 2


class MetricsTail:
    """The log of a run, of which each call reads only what was appended since the one before."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._clear()

    def _clear(self) -> None:
        self._offset, self._last = 0, b""
        self.loss, self.val_loss = Curve(), Curve()
        self.phase_starts: list[tuple[int, str]] = []
        """The step after which each phase begins, with its name; of the first its first logged one.
        """
        self.newest: dict[str, Any] = {}
        """The newest line of a training step."""
        self._paces: deque[tuple[int, float]] = deque(maxlen=PACE_LINES)

    def read(self, path: Path) -> None:
        """Read what was appended; everything again if the file is another, or was cut.

        A missing file leaves nothing. Lines that are no JSON objects are skipped: the last one may
        still be being written.
        """
        try:
            with open_to_read(path) as stream:
                if path != self._path or not self._continues(stream):
                    self._clear()
                    self._path = path
                    self._skip_to_tail(stream)
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            self._clear()
            return
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self._offset += len(whole)
            self._last = whole[-LONGEST_LINE:]
            for line in whole.splitlines():
                self._add(line)

    def steps_per_second(self) -> float | None:
        """Return the pace over the newest lines, checkpoints and validations included."""
        if len(self._paces) < 2:
            return None
        (step, seconds), (last_step, last_seconds) = self._paces[0], self._paces[-1]
        return (last_step - step) / (last_seconds - seconds)

    def time_split(self) -> dict[str, float]:
        """Return the share of each part of the newest steps, the largest first."""
        parts = {
            key.removeprefix(SECONDS): value
            for key, value in self.newest.items()
            if key.startswith(SECONDS) and isinstance(value, int | float)
        }
        whole = sum(parts.values())
        ordered = sorted(parts.items(), key=lambda one: -one[1])
        return {part: value / whole for part, value in ordered} if whole > 0 else {}

    def _continues(self, stream: IO[bytes]) -> bool:
        """Return whether the file still begins with what was read: a new start writes it again."""
        if os.fstat(stream.fileno()).st_size < self._offset:
            return False
        stream.seek(self._offset - len(self._last))
        return stream.read(len(self._last)) == self._last

    def _skip_to_tail(self, stream: IO[bytes]) -> None:
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE_BYTES:
            return
        start = size - TAIL_BYTES
        for number in range(SAMPLED_LINES):
            stream.seek(start * number // SAMPLED_LINES)
            lines = stream.read(LONGEST_LINE).split(b"\n")
            for line in lines[1 if number else 0 : -1][:1]:
                self._add(line)
        stream.seek(start)
        self._offset = start + len(stream.readline(LONGEST_LINE))

    def _add(self, line: bytes) -> None:
        for values in _objects(line):
            step, phase = values.get("step"), values.get("phase")
            if not isinstance(step, int) or not isinstance(phase, str):
                continue
            if isinstance(value := values.get("val_loss"), int | float):
                self.val_loss.add(step, float(value))
            if "loss" not in values:
                continue
            if not self.phase_starts or self.phase_starts[-1][1] != phase:
                # The last step of a phase has a line, whatever log_every is.
                switch = self.newest["step"] if self.phase_starts else step
                self.phase_starts.append((switch, phase))
                self._paces.clear()
            if isinstance(value := values["loss"], int | float):
                self.loss.add(step, float(value))
            if isinstance(seconds := values.get("seconds"), int | float):
                if self._paces and (self._paces[-1][0] >= step or self._paces[-1][1] >= seconds):
                    self._paces.clear()
                self._paces.append((step, float(seconds)))
            self.newest = values


def _objects(line: bytes) -> Iterator[dict[str, Any]]:
    with suppress(DocumentError):
        yield check_object(parse_json(line, LOG), LOG)
