"""What checking adds to `zerotrain sample`: weights with a U-Net file of 5 GB.

    python benchmarks/verify.py            # from the project's root, in its environment
    python benchmarks/verify.py --gigabytes 1 --folder /scratch

The weights are checked as `sample` checks them, for the first time and again, and read as diffusers
reads them; the file is in the page cache, as after an export. The last line is JSON: seconds by the
clock, and of the processor, which other work on the machine stretches less, and ratios to reading.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from zerotrain import artifact
from zerotrain.artifact import verdicts
from zerotrain.artifact.tensor_file import write_tensor_file
from zerotrain.export.formats.opening import check_whole

FILE = "unet/diffusion_pytorch_model.safetensors"
TENSOR_BYTES = 2**25


def make_weights(folder: Path, gigabytes: float) -> None:
    """Publish weights whose tensors are random."""
    count = max(1, round(gigabytes * 1e9 / TENSOR_BYTES))
    noise = torch.randint(-(2**15), 2**15, (TENSOR_BYTES // 2,), dtype=torch.int16)
    layout = {f"layer.{n}": (torch.int16, [TENSOR_BYTES // 2]) for n in range(count)}
    with artifact.publish(folder, "weights") as draft:
        (draft.folder / FILE).parent.mkdir()
        draft.known[FILE] = write_tensor_file(
            draft.folder / FILE, layout, lambda name: noise ^ int(name.split(".")[1])
        )
        draft.content = {"family": "sdxl", "step": 1, "dtype": "fp16"}


def seconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians of some calls: seconds by the clock, and of the processor."""
    clock, processor = [], []
    for _ in range(repeats):
        start, spent = time.perf_counter(), time.process_time()
        work()
        clock.append(time.perf_counter() - start)
        processor.append(time.process_time() - spent)
    return statistics.median(clock), statistics.median(processor)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, default=None, help="where the file is written")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        weights = Path(name, "weights")
        make_weights(weights, options.gigabytes)
        time.sleep(2 * verdicts.SETTLED_SECONDS)

        def first() -> None:
            verdicts.verdicts_file().unlink(missing_ok=True)
            check_whole(weights, None)

        def read() -> None:
            for tensor in load_file(weights / FILE).values():
                tensor.clone()

        reading, of_reading = seconds(read, options.repeats)
        checking, of_checking = seconds(first, options.repeats)
        again, _ = seconds(lambda: check_whole(weights, None), options.repeats)
    print(
        json.dumps(
            {
                "gigabytes": options.gigabytes,
                "read_seconds": round(reading, 3),
                "check_seconds": round(checking, 3),
                "check_seconds_per_gigabyte": round(checking / options.gigabytes, 3),
                "check_processor_seconds_per_gigabyte": round(of_checking / options.gigabytes, 3),
                "processor_time_ratio": round(1 + of_checking / of_reading, 3),
                "check_again_seconds": round(again, 5),
                "time_ratio": round(1 + checking / reading, 3),
                "again_time_ratio": round(1 + again / reading, 5),
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
