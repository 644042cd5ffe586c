"""How long the built-in example takes from nothing, and how long it takes to say nothing to do.

    python benchmarks/example.py        # from the project's root, in its environment

Works on a copy of the project; the last line is JSON: seconds of the first and the second call, and
the metrics of the last phase. `limit_ratio` is the first call's time over five minutes, which are
meant for two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 300


def call(folder: Path) -> tuple[float, str]:
    """Seconds and output of `snakemake --cores all train`."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "all", "train"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "workflow")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stdout[-4000:])
    return time.monotonic() - began, done.stdout


def main() -> None:
    """Run both calls and print the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "project"
        ignored = shutil.ignore_patterns(".*", "results", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, folder, ignore=ignored)
        first, _ = call(folder)
        second, said = call(folder)
        if "Nothing to be done" not in said:
            sys.exit(said)
        phases = sorted(
            folder.glob("results/*/*/metrics.json"), key=lambda path: path.stat().st_mtime
        )
        metrics = json.loads(phases[-1].read_text())
        print(
            json.dumps(
                {
                    "cores": os.cpu_count(),
                    "first_call_seconds": round(first, 1),
                    "limit_ratio": round(first / LIMIT_SECONDS, 3),
                    "nothing_to_do_seconds": round(second, 2),
                    **metrics,
                }
            )
        )


if __name__ == "__main__":
    main()
