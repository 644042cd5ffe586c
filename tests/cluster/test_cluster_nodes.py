"""A training over two nodes ends where one machine's does."""

from __future__ import annotations

import pytest
import torch
from tests.cluster.conftest import NO_GPUS, PROFILE, Project, weights

pytestmark = pytest.mark.slow

CONFIG = """\
run: {run}
base: nano
data: {{name: digits, source: digits, holdout: 0.5}}
train: {{resolution: 32, global_batch_size: 32, learning_rate: 1.0e-3, save_every: 5, log_every: 1}}
launch: {{num_cpu_threads_per_process: 1, {launch}}}
phases:
  - {{name: plain, until: 8, launch: torch}}
  - {{name: sharded, until: 16, launch: zero2}}
evaluate: {{images_per_prompt: 1, num_inference_steps: 2, batch_size: 100}}
"""
PHASES = ("plain", "sharded")


@pytest.mark.soak
@pytest.mark.parametrize("target", ["results/nodes/sharded/weights/manifest.json", "train"])
def test_two_nodes_train_what_one_machine_does(project: Project, target: str) -> None:
    """The example, shortened, in two phases of two nodes with two processes each: every bit of one
    machine's with four; and within 1e-5, relative, of one process's. Each phase was one job of two
    nodes, and neither was tried twice."""
    launches = {"nodes": "machines: 2, processes_per_machine: 2", "machine": "num_processes: 4"}
    for run, launch in {**launches, "process": "num_processes: 1"}.items():
        project.configure(run, CONFIG.format(run=run, launch=launch))
    project.snakemake(*PROFILE, *NO_GPUS, "--configfile", "config/nodes.yaml", "--", target)
    shown = project.cluster.ask("scontrol", "show", "job", "-o").splitlines()
    mine = [line for line in shown if str(project.folder) in line]
    trained = [line for line in mine if "Comment=rule_train_phase" in line]
    assert len(trained) == 2
    assert all(" NumNodes=2 " in line and " NodeList=n[1-2] " in line for line in trained)
    for run in ("machine", "process"):
        last = f"results/{run}/sharded/weights/manifest.json"
        project.snakemake("--cores", "2", "--configfile", f"config/{run}.yaml", "--", last)
    results = project.folder / "results"
    for phase in PHASES:
        nodes, machine, process = (
            weights(results / run / phase) for run in ("nodes", "machine", "process")
        )
        assert torch.equal(nodes, machine)
        assert (nodes - process).norm() <= 1e-5 * process.norm()
        assert not torch.equal(nodes, process)  # or the comparison is with itself
        assert project.steps(f"nodes/{phase}")[-1] == {"plain": 8, "sharded": 16}[phase]
