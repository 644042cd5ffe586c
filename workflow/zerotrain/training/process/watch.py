"""Watchdog in the process that started a training: it checks whether the training still moves.

A library's own timeout ends a wait for other processes. A single process that hangs in a data
loader, a file system or a GPU has no timeout, and a stopped one cannot report it. Nothing counts as
a hang while any process moves: a long save, a first step or a compilation runs through Python and
does move.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from zerotrain.training.process import ending
from zerotrain.training.process.failures import CONTINUES, EXIT_FAULT
from zerotrain.training.reporting import heartbeat
from zerotrain.training.reporting.heartbeat import BEAT_SECONDS, RankStatus

OWN_TIMEOUT_SECONDS = 15.0
"""Extra time for several processes: the waits of the healthy ones time out by themselves first."""


class Watch:
    """Context manager that ends a training that hangs, and leaves the reason."""

    def __init__(self, progress: Path, phase: str, timeout: float) -> None:
        """Set up a watch.

        Args:
            progress: The progress folder.
            phase: The phase's name.
            timeout: Seconds without a move that count as a hang.
        """
        self._progress, self._phase, self._timeout = progress, phase, timeout
        self._closed = threading.Event()
        self._last: dict[int, float] = {}
        self._unseen: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(BEAT_SECONDS):
            now = time.monotonic()
            statuses = heartbeat.read_statuses(self._progress)
            # As in the process itself: the time in which a job is suspended is no hang.
            stalled = self._stalled_seconds(statuses, min(now - before, 2 * BEAT_SECONDS))
            before = now
            more = OWN_TIMEOUT_SECONDS if len(statuses) > 1 else 0.0
            if statuses and stalled >= self._timeout + more:
                self._end(statuses, stalled)
                return

    def _stalled_seconds(self, statuses: list[RankStatus], elapsed: float) -> float:
        """Return the seconds since any process last moved."""
        for one in statuses:
            same = self._last.get(one.rank) == one.time
            self._unseen[one.rank] = self._unseen.get(one.rank, 0.0) + elapsed if same else 0.0
            self._last[one.rank] = one.time
        return min((one.still + self._unseen[one.rank] for one in statuses), default=0.0)

    def _end(self, statuses: list[RankStatus], stalled: float) -> None:
        now = time.time()
        who = "; ".join(one.describe(now) for one in heartbeat.late_ranks(statuses, now))
        ending.write_exit_record(
            self._progress,
            EXIT_FAULT,
            f"phase {self._phase}: nothing has moved for {stalled:.0f} s: {who}",
            hint="if so long a step is meant, raise launch.ddp_timeout; else look at that "
            f"process's disk, file system and GPU (`dmesg`, `nvidia-smi`): {CONTINUES}",
        )
        heartbeat.end_all(self._progress)
