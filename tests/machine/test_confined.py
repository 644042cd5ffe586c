"""A process that calls code of others shares nothing with its caller but the answers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from zerotrain.machine.confined import Confined


def test_a_lock_of_the_caller_ends_with_the_caller(tmp_path: Path) -> None:
    """The child that waits for its next call has no copy of the file."""
    path = tmp_path / "lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        confined = Confined(str.upper, "call")
        assert confined("a") == "A"
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert confined("b") == "B"
    finally:
        os.close(handle)
        confined.close()


def test_an_object_of_the_caller_closes_no_file_of_the_call(tmp_path: Path) -> None:
    """Collected in the child, it closes its number; files of the call have others."""
    path = tmp_path / "text"
    path.write_text("a", encoding="utf-8")
    held = [path.open(encoding="utf-8") for _ in range(20)]

    def read(_: str) -> str:
        files = [path.open(encoding="utf-8") for _ in range(held[-1].fileno())]
        held.clear()
        return "".join(file.read() for file in files)

    confined = Confined(read, "call")
    try:
        assert set(confined("")) == {"a"}
    finally:
        confined.close()
        for file in held:
            file.close()
