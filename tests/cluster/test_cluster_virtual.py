"""The virtual cluster is a real one: what other tests rely on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest
from tests.cluster.conftest import wait_until
from tests.cluster.virtual_slurm import VirtualSlurm


@pytest.mark.slow
def test_a_job_has_two_nodes_with_two_gpus_each(cluster: VirtualSlurm, tmp_path: Path) -> None:
    """And its commands work where SLURM_CONF is not in the environment."""
    output = tmp_path / "out"
    inner = "env -u SLURM_CONF srun sh -c 'echo $SLURMD_NODENAME $SLURM_GPUS_ON_NODE'"
    cluster.ask(
        *("sbatch", "--wait", "--nodes=2", "--ntasks=2", "--gres=gpu:2", "--mem=100"),
        *("--output", str(output), "--wrap", inner),
    )
    assert sorted(output.read_text().split("\n")) == ["", "n1 2", "n2 2"]


def test_a_dead_node_comes_back(cluster: VirtualSlurm, tmp_path: Path) -> None:
    """With all that ran on it gone, without a word."""
    written, trapped = tmp_path / "pid", tmp_path / "trapped"
    inner = f"trap 'touch {trapped}' TERM; echo $$ >{written}; while sleep 1; do :; done"
    where = ("--no-requeue", "-w", "n2", "--mem=100", "--output=/dev/null")
    cluster.ask("sbatch", *where, "--wrap", inner)
    pid = wait_until(lambda: written.exists() and written.read_text().strip(), "the job")
    cluster.kill_node("n2")
    wait_until(lambda: not running(int(pid)), "its end")
    cluster.clear()
    assert not trapped.exists()
    assert cluster.ask("sinfo", "-h", "-n", "n2", "-p", "cpu", "-o", "%t") == "idle"


def running(pid: int) -> bool:
    """Whether a process runs; one that no one has waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
