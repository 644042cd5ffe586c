"""TensorBoard event files: one for each start.

A file begins with the step from which it counts: it replaces the points of earlier files from that
step on. TensorBoard reads the files in the order of their names, which begin with the time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text

from zerotrain.machine.regular_file import make_folder, open_new


class EventFile:
    """New event file."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        """Open the file.

        Args:
            folder: The folder of one TensorBoard run; made if it is missing.
            purge_step: The step from which earlier files no longer count.

        Raises:
            FileError: a link or a file is in the folder's place.
        """
        make_folder(folder)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}.0"
        self._stream = open_new(folder / name, replace=False)
        self._records = RecordWriter(self._stream)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(step=step, summary=Summary(value=points)))

    def add_text(self, name: str, markdown: str, step: int) -> None:
        """Add a text."""
        summary = text(name, markdown)  # type: ignore[no-untyped-call]
        self._add(Event(step=step, summary=summary))

    def flush(self) -> None:
        """Hand the added events to the operating system, so that they survive this process."""
        self._stream.flush()

    def close(self) -> None:
        """Finish the file."""
        self._stream.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
