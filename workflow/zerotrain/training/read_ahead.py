"""The loop's batches, read by a thread before the loop asks for them.

A batch depends only on the number of its first sample (zerotrain.data.draws), so reading ahead
changes no result. The thread uses none of the model's random generators.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

import torch

from zerotrain.models.families import Batch
from zerotrain.training.batches import Batches, move_to_device

DEPTH = 2
"""Batches held in host memory, so that one read that takes longer than a step delays no step."""


class _Run:
    """A sequence of batches, each `stride` samples after the one before."""

    def __init__(self, first: int, size: int, stride: int) -> None:
        self.first, self.size, self.stride = first, size, stride
        """`first` is that of the next batch to be taken."""
        self.ready: deque[Batch | BaseException] = deque()
        self.ended = False


class ReadAhead:
    """Batches in the order of a training loop. A context manager: its thread ends with its block.

    Args:
        batches: Reads single batches.
        stride: Samples from the start of a batch to the start of the next one: what all processes
            take at a time.
    """

    def __init__(self, batches: Batches, stride: int) -> None:
        self._batches = batches
        self._stride = stride
        self._turn = threading.Condition()
        self._run: _Run | None = None
        self._thread: threading.Thread | None = None

    def batch(self, first: int, size: int, device: torch.device) -> Batch:
        """Return samples `first` to `first + size` of the run, on the device.

        Raises whatever reading this batch raised.
        """
        run = self._run
        if run is None or (run.first, run.size) != (first, size):
            run = self._begin(first, size)
        with self._turn:
            self._turn.wait_for(lambda: run.ready)
            batch = run.ready.popleft()
            run.first += run.stride
            self._turn.notify_all()
        if isinstance(batch, BaseException):
            self.close()
            raise batch
        return move_to_device(batch, device)

    def name(self, position: int) -> str:
        """Return the name that a user knows a sample by."""
        return self._batches.name(position)

    def close(self) -> None:
        """End the thread after the batch that it is reading."""
        with self._turn:
            if self._run is not None:
                self._run.ended = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._run = self._thread = None

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, first: int, size: int) -> _Run:
        self.close()
        run = self._run = _Run(first, size, self._stride)
        self._thread = threading.Thread(
            target=self._read, args=(run,), name="read ahead", daemon=True
        )
        self._thread.start()
        return run

    def _read(self, run: _Run) -> None:
        first = run.first
        while True:
            batch: Batch | BaseException
            try:
                batch = self._batches.read(first, run.size)
            except BaseException as error:  # `batch` raises it when the loop reaches this batch
                batch = error
            with self._turn:
                run.ready.append(batch)
                self._turn.notify_all()
                self._turn.wait_for(lambda: run.ended or len(run.ready) < DEPTH)
                if run.ended or isinstance(batch, BaseException):
                    return
            first += run.stride
