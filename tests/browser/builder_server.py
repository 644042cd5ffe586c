"""The builder's server, as a user starts it, in a copy of the project."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit


@dataclass(frozen=True)
class Builder:
    """A server and its project."""

    folder: Path
    """The project's."""
    printed: str
    """The address that it printed, with the token."""

    def address(self, path: str = "/", **query: str) -> str:
        """The address of one of its pages, for a browser that has not been there."""
        parts = urlsplit(self.printed)
        given = "&".join(filter(None, [urlencode(query), parts.query]))
        return f"{parts.scheme}://{parts.netloc}{path}?{given}"


@contextmanager
def serve(folder: Path) -> Iterator[Builder]:
    """Start `zerotrain builder` in a project, on a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder.parent / "builder.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "zerotrain", "builder", "--port", str(port)],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(folder / "workflow")},
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield Builder(folder, _read_address(log, server))
    finally:
        server.terminate()
        server.wait(20)


def _read_address(log: Path, server: subprocess.Popen[bytes]) -> str:
    """Wait for what a server prints as it starts."""
    for _ in range(600):
        if printed := re.search(r"http://\S+\n", log.read_text(encoding="utf-8")):
            return printed[0].strip()
        assert server.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.1)
    raise AssertionError(f"no address in a minute: {log.read_text(encoding='utf-8')}")
