"""What jobs ask a cluster for: the planner's memory, time, GPUs, machines."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.workflow.conftest import Project

from zerotrain.config.read import read_config
from zerotrain.launch.planner.forecasts import LIBRARIES, SNAKEMAKE, machine_memory
from zerotrain.launch.planner.planner import PlannedMachine, plan

ASKED = ("--default-resources", "mem_mb=1000", "disk_mb=1000")
SEVERAL = "global_batch_size: 4\n    launch: {preset: zero2, machines: 2, processes_per_machine: 2}"


def resources(said: str) -> dict[str, dict[str, Any]]:
    """The resources that a dry run prints, by the first output of each job."""
    found = {}
    for output, listed in re.findall(
        r"    output: ([^,\n]+).*?\n    resources: ([^\n]*)", said, re.S
    ):
        found[output] = dict(pair.split("=", 1) for pair in listed.split(", "))
    return found


def of(found: dict[str, dict[str, Any]], phase: str, key: str) -> Any:
    """One resource of a phase's training."""
    return found[f"results/tiny/{phase}/checkpoint/manifest.json"].get(key)


def test_cluster_resources_are_not_forecast_for_one_machine(project: Project):
    """Without a cluster no one asks for memory, and nothing is forecast; a phase of one machine
    wants no nodes, and one GPU a process."""
    said = project.must("snakemake", "-n", "--verbose", "train")
    found = resources(said)
    assert "mem_mb" not in said
    assert not (project.folder / ".snakemake/forecasts").exists()
    assert of(found, "plain", "gres") == "gpu:1"
    assert of(found, "plain", "runtime") == "1440"
    assert {of(found, "plain", key) for key in ("nodes", "tasks", "mpi")} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("gres", ["gpu", pytest.param("none", marks=pytest.mark.soak)])
def test_cluster_resources_are_the_planners(project: Project, gres: str, monkeypatch):
    """The memory of every job is what the planner says: of one machine's host, or of all that a
    phase takes where the profile gives it no GPU. Forecasts are made once for each size."""
    project.edit("config/config.yaml", "launch: zero2_offload", SEVERAL)
    without = ("--set-resources", "train_phase:gres=none") if gres == "none" else ()
    said = project.must("snakemake", "-n", "--verbose", "train", *ASKED, *without)
    found = resources(said)
    monkeypatch.chdir(project.folder)
    run, cpu = read_config(project.folder / "config/config.yaml"), gres == "none"
    for phase, machines, processes, preset in (
        ("plain", 1, 1, "torch"),
        ("offload", 2, 2, "zero2"),
    ):
        made = plan(run, phase, PlannedMachine(None, None, cpu=cpu), only=[preset])
        row = made.rows[preset][made.mode]
        model = (row.device if cpu else row.host) // machines
        planned = model + (processes + 1) * LIBRARIES + SNAKEMAKE
        assert int(of(found, phase, "mem_mb")) == -(-planned // 2**20)
        said_of = machine_memory(run, phase, cpu=cpu)
        for rule, folder in (
            ("evaluate", f"tiny/{phase}/evaluation"),
            ("export_weights", f"tiny/{phase}/weights"),
            ("cache_latents", "data/tiny/cache/64"),
        ):
            asked = found[f"results/{folder}/manifest.json"]["mem_mb"]
            assert int(asked) == -(-said_of[rule] // 2**20)
    several = {"nodes": "2", "tasks": "2", "tasks_per_gpu": "0", "mpi": "srun"}
    assert {key: of(found, "offload", key) for key in several} == several
    fixed = {"tiny/base": 3, "data/tiny": 1}
    assert {
        folder: int(found[f"results/{folder}/manifest.json"]["mem_mb"]) // 1024 for folder in fixed
    } == fixed
    assert of(found, "plain", "gres") == ("none" if cpu else "gpu:1")
    stored = project.folder / ".snakemake/forecasts"
    times = {path: path.stat().st_mtime_ns for path in stored.iterdir()}
    assert len(times) == 2
    if cpu:
        return
    project.edit("config/config.yaml", "learning_rate: 1.0e-3", "learning_rate: 2.0e-3")
    assert resources(project.forked("-n", "--verbose", "train", *ASKED)[1]) == found
    assert {path: path.stat().st_mtime_ns for path in stored.iterdir()} == times
    project.edit("config/config.yaml", "resolution: 64", "resolution: 128")
    project.forked("-n", "--verbose", "train", *ASKED)
    assert len([*stored.iterdir()]) == 4
