"""Signals to a training's process: the first asks for a checkpoint and an end, the second ends it.

Under clusters and torchrun one signal often arrives twice, from the system and from the launcher
that hands it on. So what comes within a moment of the first is the same request.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from zerotrain.supervise import SAME_SECONDS, heard
from zerotrain.training import lock
from zerotrain.training.progress_folder import STOP


class StopRequest:
    """True once somebody has touched progress/stop or sent a signal."""

    def __init__(self, progress: Path, *, tell: bool = False) -> None:
        """Listen from now on.

        Args:
            progress: Folder of the progress.
            tell: Whether to hand a signal on, as the file progress/stop.
        """
        self._file = progress / STOP
        self._first: float | None = None
        self._tell = tell
        for number in heard():
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            if self._tell:
                self._file.touch()
        elif now - self._first > SAME_SECONDS:
            lock.release_all()
            os._exit(128 + number)

    def __call__(self) -> bool:
        return self._first is not None or self._file.exists()
