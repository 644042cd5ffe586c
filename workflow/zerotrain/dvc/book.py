"""What the agreement notes between two calls of snakemake, in .snakemake/agreement.json.

{"looked": time at which the books last agreed, "seen": {output without a record: its time} and
"lock": [time, size] of dvc.lock when records were last settled, "entered": digest of what was last
entered in dvc.lock, "running": {"pid", "host", "began", "given"} of the run that is under way}
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from zerotrain.artifact import write_whole

BOOK = Path(".snakemake/agreement.json")


def read_book() -> dict[str, Any]:
    """What was noted; empty where nothing was, or nothing that can be read."""
    try:
        found: dict[str, Any] = json.loads(BOOK.read_text())
        found["looked"] = float(found.get("looked", 0.0))
        if running := found.get("running"):
            found["running"] = {key: running[key] for key in ("pid", "host", "began", "given")}
        found["seen"] = dict(found.get("seen", {}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return found


def write_book(**values: Any) -> None:
    """Change the book."""
    write_whole(BOOK, json.dumps({**read_book(), **values}))


def note_running(given: str) -> None:
    """A run begins: were it killed, what it made would not be entered.

    Args:
        given: Digest of the configuration's values.
    """
    me = psutil.Process()
    process = {"pid": me.pid, "host": socket.gethostname(), "began": me.create_time()}
    write_book(running={**process, "given": given})


def lock_stamp() -> list[int] | None:
    """Time and size of dvc.lock; None where there is none."""
    try:
        stat = os.stat("dvc.lock")
    except OSError:
        return None
    return [stat.st_mtime_ns, stat.st_size]


def lives(running: Mapping[str, Any]) -> bool:
    """Whether the run that was noted is under way, and another than this process."""
    if running["host"] != socket.gethostname():
        return any(Path(".snakemake/locks").glob("*.lock"))
    try:
        process = psutil.Process(running["pid"])
        return process.create_time() == running["began"] and process.pid != os.getpid()
    except psutil.NoSuchProcess:
        return False
