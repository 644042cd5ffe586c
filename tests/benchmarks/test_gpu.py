"""The benchmark of one GPU, in a dry run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHOSEN = ("ceilings", "encode_1024", "switch_small_unet", "sdxl_zero2_offload_1024_1")


@pytest.mark.slow
def test_a_dry_run_measures_predicts_and_resumes(tmp_path: Path) -> None:
    """Each kind of measurement succeeds on a CPU with all figures, and is not repeated."""
    out = tmp_path / "gpu.jsonl"
    command = [
        *(sys.executable, str(ROOT / "benchmarks/gpu.py"), "--dry-run", "--out", str(out)),
        *("--only", ",".join(CHOSEN)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = {line["name"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert set(CHOSEN) | {"compiled_ops", "sdxl_zero2_offload_1024_1:planner"} == lines.keys()
    assert all(line["ok"] for line in lines.values())
    assert lines["switch_small_unet"]["largest_loss_deviation"] < 1e-5
    assert lines["switch_small_unet"]["steps_compared"] == 6
    training = lines["sdxl_zero2_offload_1024_1"]
    assert {
        "seconds_per_step", "device", "device_setup", "host_available_fell_by_mib",
        "host_rss_peak_mib", "seconds_of_parts", "losses", "parameters",
    } <= training.keys()  # fmt: skip
    assert len(training["losses"]) == 3
    assert lines["sdxl_zero2_offload_1024_1:planner"]["tflop_per_step"] > 0

    before = out.read_bytes()
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    new = out.read_bytes().removeprefix(before).decode().splitlines()
    assert [json.loads(line)["name"] for line in new] in ([], ["compiled_ops"])


@pytest.mark.slow
def test_the_tuning_compares_arms(tmp_path: Path) -> None:
    """Each arm is a line of its own, and the table gives its time over that of the default."""
    out, arms = tmp_path / "tune.jsonl", ("default", "buckets_5M")
    chosen = [*(f"tune_zero2_offload_{arm}:1" for arm in arms), "tune_encoding_batch_4:1"]
    command = [
        *(sys.executable, str(ROOT / "benchmarks/gpu.py"), "--tune", "--dry-run"),
        *("--out", str(out), "--only", ",".join(chosen)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = {line["name"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert {*chosen, "compiled_ops"} == lines.keys()
    assert lines[chosen[1]]["case"]["zero"]["reduce_bucket_size"] == 5_000_000
    assert lines[chosen[2]]["batch"] == 4
    compared = [line.split()[:2] for line in done.stdout.splitlines() if "the default" in line]
    assert compared == [["zero2_offload", arm] for arm in arms]
