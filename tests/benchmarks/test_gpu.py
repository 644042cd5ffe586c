"""The benchmark of one GPU, in a dry run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.builders.bare_environment import make_bare_environment

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


NO_NETWORK = [
    "unshare",
    "--map-root-user",
    "--net",
    "sh",
    "-c",
    'ip link set lo up; exec "$@"',
    "-",
]


@pytest.mark.soak
def test_nothing_is_missing_with_only_the_wheels(tmp_path: Path) -> None:
    """Every measurement, offline, in the environment of a machine with a GPU."""
    version = ".".join(map(str, sys.version_info[:2]))
    wheels = tmp_path / "wheels"
    subprocess.run([ROOT / "benchmarks/gpu_wheels.sh", wheels, version], check=True)
    assert sum(file.stat().st_size for file in wheels.iterdir()) < 60e6
    environment = make_bare_environment(tmp_path / "bare", wheels)
    out = tmp_path / "gpu.jsonl"
    command = [tmp_path / "bare/bin/python", "benchmarks/gpu.py", "--dry-run", "--out", out]
    home = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*NO_NETWORK, *command], cwd=ROOT, env=environment | home,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["name"] for line in lines if not line["ok"]] == []
    listed = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--list", "--out", tmp_path / "none"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "workflow")},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    names = {line.split()[0] for line in listed.stdout.splitlines() if " about " in line}
    assert names <= {line["name"] for line in lines}
