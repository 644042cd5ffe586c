"""What each process reads of a checkpoint at a resume, against the part that it holds.

    python benchmarks/resume.py                       # from the project's root, in its environment

Processes over gloo train a stack of square layers with AdamW and an average for a step, save it,
and resume. Counted are the bytes of read calls (/proc/self/io, rchar) and the pages of the
checkpoint's files that are mapped. `<preset>_read_ratio` is that of the process that reads most,
over the masters, moments and average that it holds; plain PyTorch holds all but the average in
every process. `<preset>_state_ratio` is the same over the whole state. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from tests.training.resume_bytes import count

from zerotrain.machine import compiled_ops


def main() -> None:
    """Measure each preset and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["torch", "zero1", "zero2", "zero3"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    os.environ.update(compiled_ops.environment())
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    result: dict[str, Any] = {}
    for preset in options.presets:
        with tempfile.TemporaryDirectory() as folder:
            start = multiprocessing.get_context("spawn").Process
            found = count(start, preset, options.ranks, options.width, options.layers, Path(folder))
        most = max(found, key=lambda one: one["read"] / one["share"])
        result[f"{preset}_read_ratio"] = round(most["read"] / most["share"], 4)
        result[f"{preset}_state_ratio"] = round(most["read"] / most["state"], 4)
        result["state_bytes"] = most["state"]
        print(preset, most, flush=True)
    print(json.dumps({**result, "ranks": options.ranks, "layers": options.layers}))


if __name__ == "__main__":
    main()
