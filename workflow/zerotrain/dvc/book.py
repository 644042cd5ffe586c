"""What the agreement notes between two calls of snakemake, in .snakemake/agreement.json.

{"looked": time at which the books last agreed, "seen": {output without a record: its time},
"entered": digest of what was last entered in dvc.lock, "running": {"pid", "host", "began"} of the
run that is under way}
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

BOOK = Path(".snakemake/agreement.json")


def read_book() -> dict[str, Any]:
    """What was noted; empty where nothing was."""
    try:
        found = json.loads(BOOK.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_book(**values: Any) -> None:
    """Change the book."""
    BOOK.parent.mkdir(exist_ok=True)
    new = BOOK.with_name(f"{BOOK.name}.{os.getpid()}")
    new.write_text(json.dumps({**read_book(), **values}))
    new.replace(BOOK)


def note_running() -> None:
    """A run begins: were it killed, what it made would not be entered."""
    me = psutil.Process()
    write_book(running={"pid": me.pid, "host": socket.gethostname(), "began": me.create_time()})


def lives(running: Mapping[str, Any]) -> bool:
    """Whether the run that was noted is under way, and another than this process."""
    if running["host"] != socket.gethostname():
        return any(Path(".snakemake/locks").glob("*.lock"))
    try:
        process = psutil.Process(running["pid"])
        return process.create_time() == running["began"] and process.pid != os.getpid()
    except psutil.NoSuchProcess:
        return False
