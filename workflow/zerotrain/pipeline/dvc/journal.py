"""The sync journal, .snakemake/agreement.json: state that is kept between two calls of snakemake.

{"looked": time at which metadata and dvc.lock last agreed, "seen": {output without a record: its
time} and "lock": [time, size] of dvc.lock when metadata was last written, "entered": digest of what
was last committed to dvc.lock, "running": {"pid", "host", "began", "given"} of the run in progress}
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

JOURNAL = Path(".snakemake/agreement.json")


def read_journal() -> dict[str, Any]:
    """Read the journal; return an empty mapping if it is missing or invalid."""
    try:
        found: dict[str, Any] = json.loads(JOURNAL.read_text())
        found["looked"] = float(found.get("looked", 0.0))
        if running := found.get("running"):
            found["running"] = {key: running[key] for key in ("pid", "host", "began", "given")}
        found["seen"] = dict(found.get("seen", {}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return found


def update_journal(**values: Any) -> None:
    """Update values of the journal."""
    write_whole(JOURNAL, json.dumps({**read_journal(), **values}))


def note_running(given: str) -> None:
    """Record that a run starts: if it is killed, its results are not in dvc.lock.

    Args:
        given: Digest of the configuration's values.
    """
    me = psutil.Process()
    process = {"pid": me.pid, "host": socket.gethostname(), "began": me.create_time()}
    update_journal(running={**process, "given": given})


def lock_stamp() -> list[int] | None:
    """Return the time and size of dvc.lock; None if it is missing."""
    try:
        stat = os.stat("dvc.lock")
    except OSError:
        return None
    return [stat.st_mtime_ns, stat.st_size]


def is_alive(running: Mapping[str, Any]) -> bool:
    """Return whether the recorded run is in progress, in a process other than this one."""
    if running["host"] != socket.gethostname():
        return any(Path(".snakemake/locks").glob("*.lock"))
    try:
        process = psutil.Process(running["pid"])
        return process.create_time() == running["began"] and process.pid != os.getpid()
    except psutil.NoSuchProcess:
        return False
