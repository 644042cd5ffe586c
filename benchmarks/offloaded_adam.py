"""Time of a step of the offloaded Adam with its moments in bf16, over DeepSpeed's own in float32.

    python benchmarks/offloaded_adam.py    # from the root, in the environment
    python benchmarks/offloaded_adam.py --numel 100000000 --threads 8

Both step as many float32 weights, in turns, so that other work on the machine meets both. The last
line is JSON: `time_ratio` is the median of the pairs, `interval` their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

from zerotrain.machine import compiled_ops


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=40_000_000, help="weights")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ.update(compiled_ops.environment(), OMP_NUM_THREADS=str(options.threads))
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from zerotrain.training.optim.adam_bf16_states import AdamBf16States

    torch.set_num_threads(options.threads)
    made = []
    for kind in (DeepSpeedCPUAdam, AdamBf16States):
        parameter = torch.nn.Parameter(torch.zeros(options.numel))
        parameter.grad = torch.randn(options.numel)
        made.append(kind([parameter], lr=1e-5))
    seconds: list[list[float]] = [[], []]
    for number in range(options.rounds + 1):
        for optimizer, own in zip(made, seconds, strict=True):
            began = time.perf_counter()
            optimizer.step()
            if number:  # the first makes the moments
                own.append(time.perf_counter() - began)
    ratios = [bf16 / plain for plain, bf16 in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    result = {
        "time_ratio": round(middle, 3), "interval": [round(low, 3), round(high, 3)],
        "numel": options.numel, "threads": options.threads,
        "seconds": [round(statistics.median(own), 4) for own in seconds],
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
