"""The time of a step whose batches a thread reads, against one that reads them itself.

    python benchmarks/read_ahead.py                   # from the project's root, in its environment

One U-Net is trained in one process; windows of equal steps take turns, with zerotrain.training's
ReadAhead and with its Batches alone. `large` has batches of four times the samples, and latents of
twice the side. A ratio is of one round's windows; given are medians, and the interval that
holds the true one with 95 %. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import memory
from memory import make_inputs, measured_phase, publish_launch, unet_sizes
from step import SIZES, middle

CASES = {"small": (8, 8), "large": (16, 32)}
"""Side of the latents, and samples of a batch."""


def measure(folder: Path, case: str, steps: int, rounds: int) -> dict[str, Any]:
    """Measure the figures of one case."""
    import torch

    from zerotrain.cache.reader import read_cache
    from zerotrain.models.families.sdxl import FAMILY
    from zerotrain.training.batches import Batches, ReadAhead
    from zerotrain.training.loop import _accumulate
    from zerotrain.training.reporting.log import NoLog
    from zerotrain.training.setup import build_engine
    from zerotrain.training.step_counter import StepCounter

    memory.SIDE, batch = CASES[case]
    make_inputs(folder, SIZES["tiny"], samples=64)
    phase = measured_phase(
        "torch", unet_sizes(folder / "base"), 10**6, epoch_size=64, global_batch_size=batch,
        micro_batch_size=batch,
    )  # fmt: skip
    publish_launch(folder / "launch", phase)
    model = FAMILY.load_model(folder / "base")
    engine = build_engine(model, phase, folder / "launch", exact=True)
    objective = FAMILY.objective(folder / "base")
    alone: Any = Batches(read_cache(folder / "cache", verify=False), phase)
    log = NoLog()
    found: dict[str, list[float]] = {"alone": [], "ahead": []}
    with ReadAhead(alone, batch) as ahead:
        counters = {name: StepCounter(0, 0, 10**6) for name in found}
        for number in range(rounds + 2):
            for name in ("alone", "ahead") if number % 2 else ("ahead", "alone"):
                counter, batches = counters[name], {"alone": alone, "ahead": ahead}[name]
                began = time.perf_counter()
                for _ in range(steps):
                    _accumulate(engine, objective, batches, phase, counter, log)
                    engine.step(1e-6)
                    counter.step, counter.samples = counter.step + 1, counter.samples + batch
                if number > 1:
                    found[name].append((time.perf_counter() - began) / steps)
    seconds = []
    for first in range(0, 20 * batch, batch):
        began = time.perf_counter()
        alone.batch(first, batch, torch.device("cpu"))
        seconds.append(time.perf_counter() - began)
    ratio, interval = middle([a / b for a, b in zip(found["ahead"], found["alone"], strict=True)])
    return {
        f"{case}_time_ratio": round(ratio, 4),
        f"{case}_interval": interval,
        f"{case}_step_ms": round(1e3 * statistics.median(found["alone"]), 2),
        f"{case}_read_ms": round(1e3 * statistics.median(seconds), 2),
    }


def main() -> None:
    """Measure each case and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of a window")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), case, options.steps, options.rounds)
        print(case, found, flush=True)
        result |= found
    sizes = {"cases": CASES, "cores": len(os.sched_getaffinity(0)), "rounds": options.rounds}
    print(json.dumps({**result, **sizes}))


if __name__ == "__main__":
    main()
