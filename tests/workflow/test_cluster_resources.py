"""What jobs ask a cluster for: the planner's memory, time, GPUs, machines."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.workflow.conftest import Project

from zerotrain.config.read import read_config
from zerotrain.launch.planner.forecast import LIBRARIES, SNAKEMAKE, machine_memory
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


def test_cluster_resources_of_several_machines(project: Project):
    """A launcher a machine through srun, and the GPUs and threads of one machine."""
    project.edit("config/config.yaml", "launch: zero2_offload", SEVERAL)
    _, said = project.forked("-n", "--verbose", "train")
    found = resources(said)
    wanted = {"nodes": "2", "tasks": "2", "tasks_per_gpu": "0", "mpi": "srun", "gres": "gpu:2"}
    assert {key: of(found, "offload", key) for key in wanted} == wanted
    assert of(found, "plain", "nodes") is None


@pytest.mark.slow
@pytest.mark.parametrize("gres", ["gpu", "none"])
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


@pytest.mark.slow
def test_cluster_resources_grow_after_a_kill_alone(project: Project):
    """A stage that begins again asks for twice the memory, and never for more; so does a training
    that was killed, but not one that has reported how it ended, as at its time limit."""
    first = resources(project.forked("-n", "--verbose", "train", *ASKED)[1])
    progress = project.folder / "results/tiny/plain/progress"
    progress.mkdir(parents=True)
    for left, attempt, times in (("", "2", 2), ("", "3", 2), ("exit.json", "3", 1)):
        if left:
            (progress / left).write_text('{"code": 85, "reason": "stopped on request"}')
        second = resources(
            project.forked("-n", "--verbose", "train", *ASKED, "--attempt", attempt)[1]
        )
        wanted = {"checkpoint": times, "weights": 2, "evaluation": 2}
        for folder, factor in wanted.items():
            output = f"results/tiny/plain/{folder}/manifest.json"
            assert int(second[output]["mem_mb"]) == factor * int(first[output]["mem_mb"]), folder


@pytest.mark.slow
def test_cluster_resources_of_an_unknown_model_are_reported(built_on_folder: Project):
    """What the planner does not know gets a figure of its own, and a warning that names it."""
    said = built_on_folder.must("snakemake", "-n", "--verbose", "train", "--forceall", *ASKED)
    assert of(resources(said), "plain", "mem_mb") == str(32 * 1024)
    assert said.count("WARNING: run tiny: its memory cannot be forecast, 32 GiB a process") == 1
    assert "model_index.json" in said.partition("WARNING: run tiny")[2].partition("\n")[0]
