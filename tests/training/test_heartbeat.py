"""A heartbeat watches its process without changing it."""

from __future__ import annotations

import threading
import weakref
from contextlib import closing
from pathlib import Path

from zerotrain.training.reporting import heartbeat
from zerotrain.training.reporting.heartbeat import Heartbeat


class Node:
    """A local variable of the watched thread."""


def test_a_beat_keeps_no_local_variable_alive(tmp_path, monkeypatch):
    """DeepSpeed's ZeRO-3 fails if an autograd node outlives the function that looked at it."""
    beating, returned = threading.Event(), threading.Event()
    write = heartbeat.write_text

    def wait_in_the_beat(path: Path, text: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            beating.set()
            assert returned.wait(60)
        write(path, text)

    monkeypatch.setattr(heartbeat, "write_text", wait_in_the_beat)

    def look() -> weakref.ref[Node]:
        node = Node()
        assert beating.wait(60)
        return weakref.ref(node)

    with closing(Heartbeat(tmp_path, 0)):
        node = look()
        try:
            assert node() is None
        finally:
            returned.set()
