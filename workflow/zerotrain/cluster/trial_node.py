"""What a compute node sees, written to the login node line by line: `zerotrain cluster check`.

Runs there as `python -m zerotrain.cluster.trial_node FOLDER`.
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

ASKED, ANSWERED = "asked", "answered"
"""Names of the files by which both sides see that the folder is shared."""
LONGEST_WAIT = 60.0
"""Seconds after which a folder counts as not shared; caches of NFS hold for up to 60."""
HUB = "https://huggingface.co"
HUB_SECONDS = 5.0


def main(folder: Path) -> None:
    """Answer: the time first, as it is compared with the reader's clock on arrival."""
    _say({"time": time.time(), "host": platform.node()})
    waited = seconds_until(folder / ASKED)
    _say({"asked_after": waited})
    if waited is not None:
        (folder / ANSWERED).write_text((folder / ASKED).read_text())
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
    """Seconds until a file is seen; None if it is not within LONGEST_WAIT."""
    begun = time.monotonic()
    while time.monotonic() - begun < LONGEST_WAIT:
        try:
            os.listdir(file.parent)  # Makes NFS look again where it remembers that there is none.
            if file.read_text():
                return time.monotonic() - begun
        except OSError:
            pass
        time.sleep(0.05)
    return None


def _hub() -> str:
    """Why the hub cannot be reached; empty where it can. Proxies of the environment are used."""
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT") or HUB, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return ""


def _torch() -> dict[str, Any]:
    """Devices that torch computes on here, and why it may not load."""
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
