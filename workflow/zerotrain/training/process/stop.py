"""Stopping a training: the request in its processes, and asking for it from outside.

The first signal requests a checkpoint and an end, the second ends the process. Under clusters and
torchrun one signal often arrives twice, from the system and from the launcher that forwards it. So
a second signal within a moment of the first counts as the same request.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType

from zerotrain.errors import PipelineError
from zerotrain.machine.child_process import SAME_SECONDS, handled_signals
from zerotrain.machine.output import print_message
from zerotrain.machine.processes import ProcessRecord, find_parents, is_snakemake
from zerotrain.machine.regular_file import touch
from zerotrain.training.checkpointing.progress_folder import STOP, saved_steps
from zerotrain.training.process import lock

TELL_SECONDS = 10.0
"""Interval of the messages to a user who waits."""
LOOK_SECONDS, AWAY_SECONDS = 0.1, 2.0
"""Polling intervals on this host, and on another through Slurm, which all users share."""


def trainer_of(progress: Path) -> ProcessRecord | None:
    """Return the process that trains in a progress folder, if any."""
    owner = lock.read_owner(progress)
    return owner if owner and lock.is_alive(progress, owner) else None


def stop_training(progress: Path, wait: float) -> bool:
    """Ask a running training to stop, and wait for it and its parent Snakemake to end.

    Returns:
        Whether a training ran.

    Raises:
        PipelineError: it still runs after `wait` seconds.
    """
    trainer = trainer_of(progress)
    if trainer is None:
        if progress.is_dir():
            lock.hold_writer(
                progress
            ).close()  # the last process of a killed start may still be ending
        return False
    print_message(
        f"{progress}: pid {trainer.pid} on {trainer.host} trains here; it is asked to stop after "
        "its step, with a checkpoint"
    )
    # They lock the working directory.
    above = find_parents(trainer.pid) if trainer.is_running_here() else ()
    callers = [one for one in above if is_snakemake(one.words)]
    start = last_message = time.monotonic()
    touch(progress / STOP)
    while trainer_of(progress) == trainer or any(one.is_running() for one in callers):
        now = time.monotonic()
        if now - start > wait:
            newest = _newest(progress)
            raise PipelineError(
                f"{progress}: pid {trainer.pid} on {trainer.host} still runs after {wait:g} s; "
                f"newest checkpoint: {newest}; the configuration is as it was",
                hint="it stops after its present step: call this again then, or with a longer "
                f"--wait{lock.unlock_hint(progress, trainer)}",
            )
        if now - last_message >= TELL_SECONDS:
            last_message = now
            print_message(f"waiting for pid {trainer.pid}; newest checkpoint: {_newest(progress)}")
            # A training that had just started has removed the first request.
            if trainer_of(progress) == trainer:
                touch(progress / STOP)
        time.sleep(LOOK_SECONDS if trainer.host == socket.gethostname() else AWAY_SECONDS)
    return True


def _newest(progress: Path) -> str:
    return f"step {steps[-1]}" if (steps := saved_steps(progress)) else "none"


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
                touch(self._file)
        elif now - self._first > SAME_SECONDS:
            lock.release_all()
            os._exit(128 + number)

    def __call__(self) -> bool:
        return self._first is not None or self._file.exists()
