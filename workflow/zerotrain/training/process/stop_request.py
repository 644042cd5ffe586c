"""Signals to a training process: the first requests a checkpoint and an end, the second ends it.

Under clusters and torchrun one signal often arrives twice, from the system and from the launcher
that forwards it. So a second signal within a moment of the first counts as the same request.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from zerotrain.machine.child_process import SAME_SECONDS, handled_signals
from zerotrain.training.checkpointing.progress_folder import STOP
from zerotrain.training.process import lock


class StopRequest:
    """Stop flag: true once progress/stop exists or a signal has arrived."""

    def __init__(self, progress: Path, *, tell: bool = False) -> None:
        """Install the signal handlers.

        Args:
            progress: The progress folder.
            tell: Whether to forward a signal as the file progress/stop.
        """
        self._file = progress / STOP
        self._first: float | None = None
        self._tell = tell
        for number in handled_signals():
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
