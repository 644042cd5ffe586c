"""The compute node's side of `zerotrain cluster check`: facts for the login node, line by line.

It runs on the node as `python -m zerotrain.graph.cluster.trial_node FOLDER`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import read_text
from zerotrain.machine.regular_file import write_text

ASKED, ANSWERED = "asked", "answered"
"""Files that each side writes to show that the folder is shared."""
LONGEST_WAIT = 60.0
"""Seconds after which a folder counts as not shared; NFS caches last up to 60."""
HUB = "https://huggingface.co"
HUB_SECONDS = 5.0


def main(folder: Path) -> None:
    """Print the facts; the time first, as the reader compares it with its clock on arrival."""
    _say({"time": time.time(), "host": platform.node()})
    waited = seconds_until(folder / ASKED)
    _say({"asked_after": waited})
    if waited is not None:
        write_text(folder / ANSWERED, read_text(folder / ASKED))
        _say({"answered": time.time()})
    temporary = Path(tempfile.gettempdir())
    _say(
        {
            "temporary": str(temporary),
            "temporary_free": shutil.disk_usage(temporary).free,
            "hub": _hub(),
            **_torch(),
        }
    )


def seconds_until(file: Path) -> float | None:
    """Return the seconds until a file is visible; None if it is not within LONGEST_WAIT."""
    start = time.monotonic()
    while time.monotonic() - start < LONGEST_WAIT:
        try:
            os.listdir(file.parent)  # makes NFS look again for a file that it cached as missing
            if read_text(file):
                return time.monotonic() - start
        except OSError:
            pass
        time.sleep(0.05)
    return None


def _hub() -> str:
    """Return why the hub is unreachable; empty if it is. Proxies from the environment are used."""
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT") or HUB, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return ""


def _torch() -> dict[str, Any]:
    """Return the device that torch computes on here, and why torch does not load."""
    from zerotrain.machine.detect import detect, probe

    machine, found = detect(), probe()
    return {
        "machine": machine.name,
        "unused": machine.unused,
        "torch": found["error"] or "",
        "accelerator": found.get("accelerator", machine.accelerator),
    }


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
