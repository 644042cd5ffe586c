"""The benchmark of one GPU, in a dry run on the CPU, with the packages of a machine with a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.builders.bare_environment import make_bare_environment, reuse_compiled_ops

ROOT = Path(__file__).parents[2]
NO_NETWORK = [
    *("unshare", "--map-root-user", "--net", "sh", "-c"),
    'ip link set lo up && ! ip route get 192.0.2.1 2>/dev/null && exec "$@"',
    "-",
]
NO_PROXY = ["env", *(f"{kind}_proxy=http://127.0.0.1:9" for kind in ("http", "https", "all"))]
ONE = "sdxl_zero2_offload_1024_1"


@pytest.fixture(scope="module")
def wheels_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An environment of PyTorch and the wheels, without DeepSpeed's ops, and its variables."""
    folder = tmp_path_factory.mktemp("gpu")
    wheels, bare = folder / "wheels", folder / "bare"
    version = ".".join(map(str, sys.version_info[:2]))
    subprocess.run([ROOT / "benchmarks/gpu_wheels.sh", wheels, version], check=True)
    assert sum(file.stat().st_size for file in wheels.iterdir()) < 60e6
    environment = make_bare_environment(bare, wheels)
    return bare, environment | {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def bare(wheels_alone: tuple[Path, dict[str, str]]) -> tuple[Path, dict[str, str]]:
    """The same for one test: no ops of another."""
    shutil.rmtree(wheels_alone[0] / "zerotrain-ops", ignore_errors=True)
    (wheels_alone[0] / "bin/c++").unlink(missing_ok=True)
    return wheels_alone


def measured(bare: tuple[Path, dict[str, str]], *words: object, code: int = 0) -> str:
    """What gpu.py prints, which reaches no network; its exit code is 1 after a failure.

    Without the right to a network of its own, libraries are kept from the network by their proxy.
    """
    alone = subprocess.run([*NO_NETWORK, "true"], capture_output=True).returncode == 0
    command = [*(NO_NETWORK if alone else NO_PROXY), bare[0] / "bin/python", "benchmarks/gpu.py"]
    command += words
    done = subprocess.run(
        command, cwd=ROOT, env=bare[1],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-3000:]
    return done.stdout


def lines_of(out: Path) -> dict[str, dict[str, Any]]:
    """Lines by their names."""
    lines = out.read_text(encoding="utf-8").splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}


@pytest.mark.soak
def test_nothing_is_missing_with_only_the_wheels(bare, tmp_path: Path) -> None:
    """Every measurement and one round of the tuning succeed with all figures, and run once."""
    reuse_compiled_ops(bare[0])
    out = tmp_path / "gpu.jsonl"
    shown = measured(bare, "--dry-run", "--out", out)
    lines = lines_of(out)
    assert [name for name, line in lines.items() if not line["ok"]] == []

    plans = [
        measured(bare, "--list", "--out", tmp_path / "none", *more) for more in ([], ["--tune"])
    ]
    listed = {line.split()[0] for plan in plans for line in plan.splitlines() if " about " in line}
    names = {name for name in listed if not name.startswith("tune_") or name.endswith(":1")}
    trained = {name for name, line in lines.items() if "case" in line}
    predicted = {f"{name}:planner" for name in trained if not name.startswith("tune_")}
    assert lines.keys() == names | predicted | {"compiled_ops"}

    figures = {
        "seconds_per_step", "device", "device_setup", "host_available_fell_by_mib",
        "host_rss_peak_mib", "seconds_of_parts", "losses", "parameters",
    }  # fmt: skip
    for line in (lines[name] for name in trained):
        assert figures <= line.keys()
        assert len(line["losses"]) == 2
        assert "optimizer" not in line
    assert all(lines[name]["tflop_per_step"] > 0 for name in predicted)
    assert lines["switch_small_unet"]["largest_loss_deviation"] < 1e-5
    assert lines["switch_small_unet"]["steps_compared"] == 6
    buckets = lines["tune_zero2_offload_buckets_5M:1"]["case"]["zero"]
    assert buckets["reduce_bucket_size"] == 5_000_000
    assert lines["tune_encoding_batch_4:1"]["batch"] == 4
    compared = [line.split()[:2] for line in shown.splitlines() if "the default" in line]
    assert compared[:2] == [["zero2_offload", "default"], ["zero2_offload", "buckets_5M"]]

    before = out.read_bytes()
    measured(bare, "--dry-run", "--out", out)
    assert out.read_bytes() == before


@pytest.mark.soak
def test_without_compiled_adam_the_rest_is_measured(bare, tmp_path: Path) -> None:
    """torch's optimizer steps in, and the line says so; each measurement can be a new Python."""
    reuse_compiled_ops(bare[0])
    script = bare[0] / "bin/c++"
    broken = "case $PWD in */cpu_adam) echo 'error: no such flag' >&2; exit 1 ;; esac"
    shebang, _, rest = script.read_text().partition("\n")
    script.write_text("\n".join([shebang, broken, rest]))
    out = tmp_path / "gpu.jsonl"
    measured(bare, "--dry-run", "--spawn", "--only", ONE, "--out", out, code=1)
    lines = lines_of(out)
    assert not lines["compiled_ops"]["ok"]
    assert "cpu_adam did not build" in lines["compiled_ops"]["said"][0]
    assert lines[ONE]["ok"]
    assert "torch's AdamW" in lines[ONE]["optimizer"]


@pytest.mark.soak
def test_the_ops_compile_from_the_wheels(bare, tmp_path: Path) -> None:
    """The compiler finds all that it needs in the wheel and in PyTorch."""
    out = tmp_path / "gpu.jsonl"
    measured(bare, "--dry-run", "--only", ONE, "--out", out)
    lines = lines_of(out)
    assert lines["compiled_ops"]["ok"]
    assert "optimizer" not in lines[ONE]
