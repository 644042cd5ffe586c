"""The planner's figures: the headline settings of SimpleTuner, the plan's own time, a sweep's time.

    python benchmarks/plan.py              # from the project's root, in its environment

SimpleTuner's guide measured SDXL's whole U-Net under ZeRO-2 with its optimizer on the CPU, batch 8,
on an RTX 4090: 9237 MiB at 128 px and 13102 MiB at 1024 px. It trained with accelerate's and
DeepSpeed's defaults (buckets of 5e8 elements, overlap_comm) and gradient checkpointing. The
prediction stands beside it part by part, with no factor fitted to it, and what our own launch takes
in its place. The last line is JSON: predicted over measured, seconds, and how long the same plan
takes a second time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zerotrain.config.read import parse_config
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.launch.files import write_launch_files, write_run_yaml
from zerotrain.launch.planner.planner import PlannedMachine, plan
from zerotrain.launch.planner.report import parts_table
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.models.sizes import model_sizes

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
MEASURED_MIB = {128: 9237, 1024: 13102}
DEFAULTS = {"zero_optimization": {
    "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000, "overlap_comm": True,
}}  # fmt: skip
"""DeepSpeed's own, which a file of accelerate's leaves as they are."""
GOAL_SECONDS = 10.0
VARIANTS = 1000


def run(resolution: int, deepspeed: dict[str, Any]) -> dict[str, Any]:
    """Return the run of the guide."""
    launch = {"preset": "zero2_offload", "mixed_precision": "bf16", "deepspeed": deepspeed}
    train = {"resolution": resolution, "global_batch_size": 8, "gradient_checkpointing": True}
    return {
        "run": "headline", "base": SDXL, "data": {"images": "images"}, "train": train,
        "phases": [{"name": "headline", "until": 1, "launch": launch}],
    }  # fmt: skip


def headline(resolution: int) -> dict[str, float]:
    """Print the prediction part by part; predicted over measured."""
    measured = MEASURED_MIB[resolution]
    machine = PlannedMachine(24 * 2**30, None, "RTX 4090")
    theirs = plan(parse_config(run(resolution, DEFAULTS), "guide"), "headline", machine)
    ours = plan(
        parse_config(run(resolution, {}), "ours"), "headline", machine, traced=theirs.traced
    )
    found = theirs.rows["zero2_offload"]["checkpointed"]
    own = ours.rows["zero2_offload"]["checkpointed"]
    # DeepSpeed's own start makes the weights flat next to themselves; ours does not.
    (weights,) = [part for part in found.parts if (part.where, part.name) == ("device", "weights")]
    print(f"\n== SDXL, {resolution} px, batch 8, ZeRO-2 with optimizer offload ==")
    print("\n".join(parts_table(found)))
    mib, own_mib = max(found.device, 2 * weights.bytes) / 2**20, own.device / 2**20
    print(
        f"\nmeasured by nvidia-smi {measured} MiB (with the CUDA context, which is not predicted), "
        f"predicted {mib:.0f} MiB: {mib / measured:.3f}; our own launch: {own_mib:.0f} MiB, "
        f"{mib - own_mib:.0f} MiB less"
    )
    return {f"headline_{resolution}_ratio": round(mib / measured, 3),
            f"ours_{resolution}_mib": round(own_mib)}  # fmt: skip


def command_seconds(store: str) -> float:
    """Time the whole command, imports and all, with traces in a folder."""
    command = [
        *(sys.executable, "-m", "zerotrain", "plan", "--base", SDXL, "--batch-size", "8"),
        *("--device-memory", "24 GiB", "--gradient-checkpointing"),
    ]
    start = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": store}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


def render_seconds() -> float:
    """Time the rendering of configurations to launch files on the disk, each different."""
    preset = read_preset(Path("config/launch/zero2_offload.yaml"))
    sizes = model_sizes({"a.weight": [4000, 4000], "a.bias": [4000]})
    raw = run(1024, {})
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        for seed in range(VARIANTS):
            folder = Path(name) / str(seed)
            folder.mkdir()
            config = parse_config({**raw, "seed": seed}, "sweep")
            phase = resolve_phase(LaunchSettings.of(config, "headline"), preset, 1000, sizes)
            write_run_yaml(phase, folder / "run.yaml")
            write_launch_files(phase, folder, folder)
        return time.perf_counter() - start


def main() -> None:
    """Measure all, and print the figures."""
    figures: dict[str, Any] = {"render_seconds": round(render_seconds(), 2), "variants": VARIANTS}
    with tempfile.TemporaryDirectory() as store:
        first, second = command_seconds(store), command_seconds(store)
    figures["plan_seconds"] = round(first, 2)
    figures["plan_again_ratio"] = round(second / first, 3)
    figures["plan_limit_ratio"] = round(figures["plan_seconds"] / GOAL_SECONDS, 2)
    for resolution in MEASURED_MIB:
        figures |= headline(resolution)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
