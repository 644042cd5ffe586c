"""The virtual cluster is a real one: what other tests rely on."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.virtual_slurm import VirtualSlurm


def test_a_job_has_two_nodes_with_two_gpus_each(cluster: VirtualSlurm, tmp_path: Path) -> None:
    """And its commands work where SLURM_CONF is not in the environment."""
    output = tmp_path / "out"
    inner = "env -u SLURM_CONF srun sh -c 'echo $SLURMD_NODENAME $SLURM_GPUS_ON_NODE'"
    cluster.ask(
        *("sbatch", "--wait", "--nodes=2", "--ntasks=2", "--gres=gpu:2", "--mem=100"),
        *("--output", str(output), "--wrap", inner),
    )
    assert sorted(output.read_text().split("\n")) == ["", "n1 2", "n2 2"]


def test_a_dead_node_comes_back(cluster: VirtualSlurm) -> None:
    """With all that ran on it gone."""
    job = subprocess.Popen(
        ["srun", "-w", "n2", "--mem=100", "sleep", "600"],
        env=cluster.environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not cluster.jobs(running=True):
        pass
    cluster.kill_node("n2")
    assert job.wait(timeout=60) != 0
    cluster.clear()
    assert cluster.ask("sinfo", "-h", "-n", "n2", "-p", "cpu", "-o", "%t") == "idle"
