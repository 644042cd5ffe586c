"""The profiles ask a cluster for what the rules state, and survive what a cluster does to jobs.

A fake stands in for the stages, but where weights are compared; Snakemake, its executors and Slurm
are the real ones.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cluster.conftest import NO_GPUS, PROFILE, Project, wait_until, weights
from tests.cluster.virtual_slurm import VirtualSlurm

pytestmark = pytest.mark.slow

FAKE = Path(__file__).parents[1] / "workflow" / "fake_zerotrain.py"
ONCE = """\
#!/bin/sh
# zerotrain --log FILE STAGE ...: what the file once-STAGE says, if it is there, but once.
if mv "once-$3" "done-$3" 2>/dev/null; then . "./done-$3"; fi
exec {python} {fake} "$@"
"""
CONFIG = """\
run: tiny
base: nano
data: {{images: photos, num_workers: 1}}
train: {{resolution: 64, global_batch_size: 4}}
launch: {{num_cpu_threads_per_process: 1}}
phases:
  - {{name: plain, until: 300, launch: {{{launch}}}}}
"""
DATASET = "results/data/tiny/manifest.json"
TRAINED = "results/tiny/plain/checkpoint/manifest.json"
INPUTS = ("--", "base", "cache", "launch")
"""What the training reads: made here, where jobs need not queue for it."""
REAL = """\
run: {run}
base: nano
data: {{name: digits, source: digits, holdout: 0.5}}
train: {{resolution: 32, global_batch_size: 32, learning_rate: 1.0e-3, save_every: 4, log_every: 1}}
launch: {{num_cpu_threads_per_process: 1}}
phases: [{{name: plain, until: 8}}]
"""
GENERIC = ("--profile", "profiles/cluster-generic", "--latency-wait", "5")
IDS = ["slurm", "cluster-generic"]
SLURM_AND_GENERIC = pytest.mark.parametrize("profile", [PROFILE, GENERIC], ids=IDS)
SLURM = pytest.mark.parametrize(
    "profile", [PROFILE, pytest.param(GENERIC, marks=pytest.mark.soak)], ids=IDS
)
"""Jobs are the same under both; how they are submitted and cancelled has a test with both in CI."""


@pytest.fixture
def faked(private_project: Callable[[str], Path], cluster: VirtualSlurm) -> Project:
    """A project whose stages are quick, and do once what a test writes into once-STAGE."""
    project = Project(private_project("project"), cluster)
    project.configure("config", CONFIG.format(launch="num_processes: 1"))
    (project.folder / "photos").mkdir()
    (project.folder / "photos" / "cat.png").write_bytes(b"pixels")
    (project.folder / "photos" / "cat.txt").write_text("a cat\n")
    command = project.folder / "bin" / "zerotrain"
    command.parent.mkdir()
    command.write_text(ONCE.format(python=sys.executable, fake=FAKE))
    command.chmod(0o755)
    project.environment["PATH"] = f"{command.parent}:{project.environment['PATH']}"
    return project


def submitted(project: Project) -> list[dict[str, str]]:
    """What Slurm knows of the jobs that it was given, in their order."""
    jobs = project.cluster.ask("scontrol", "show", "job", "-o").splitlines()
    found = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in jobs]
    own = [job for job in found if job.get("WorkDir") == str(project.folder)]
    return sorted(own, key=lambda job: int(job["JobId"]))


def planned(project: Project, profile: tuple[str, ...]) -> dict[str, str]:
    """What a dry run says that the training asks for."""
    said = project.snakemake(*profile, "-n", "--verbose", "--", TRAINED)
    block = re.search(r"^rule train_phase:\n(.*?)\n\n", said, re.M | re.S)
    assert block, said
    line = re.search(r"resources: (.*)", block[1])
    assert line, block[1]
    return dict(one.split("=", 1) for one in line[1].split(", "))


def minutes(limit: str) -> int:
    """Slurm's [days-]hours:minutes:seconds in minutes."""
    days, _, rest = limit.rpartition("-")
    hours, mins, _ = rest.split(":")
    return (int(days or 0) * 24 + int(hours)) * 60 + int(mins)


def memory_mb(size: str) -> int:
    """Slurm's 1500M or 3G in MiB."""
    return round(float(size[:-1]) * {"M": 1, "G": 1024}[size[-1]])


@SLURM
def test_a_job_asks_for_what_the_dry_run_says(faked: Project, profile: tuple[str, ...]) -> None:
    """GPUs, memory, time and CPUs of the training, by either profile; and it may be requeued. Under
    Slurm a phase of two machines is a job of two nodes."""
    faked.configure("config", CONFIG.format(launch="num_processes: 2"))
    faked.snakemake("--cores", "2", *INPUTS)
    wanted = planned(faked, profile)
    faked.snakemake(*profile, "--", TRAINED)
    assert len(submitted(faked)) == 1
    job = submitted(faked)[-1]
    assert job["JobState"] == "COMPLETED"
    assert wanted["gres"] == "gpu:2"
    assert job["TresPerNode"] == "gres:gpu:2"
    assert memory_mb(job["MinMemoryNode"]) == int(wanted["mem_mb"])
    assert minutes(job["TimeLimit"]) == int(wanted["runtime"]) == 1440
    assert job["CPUs/Task"] == "2"  # a dry run shows the threads of this machine
    assert job["Requeue"] == "1"
    if profile == PROFILE:
        faked.configure("config", CONFIG.format(launch="machines: 2, processes_per_machine: 2"))
        faked.snakemake("--cores", "2", *INPUTS)
        faked.snakemake(*profile, "--", TRAINED)
        check_two_nodes(submitted(faked)[-1])


def check_two_nodes(job: dict[str, str]) -> None:
    """A phase of two machines has a launcher, and the GPUs of its processes, on each."""
    assert job["NumNodes"] == "2"
    assert job["NumTasks"] == "2"
    assert job["NodeList"] == "n[1-2]"
    assert job["TresPerNode"] == "gres:gpu:2"


@pytest.mark.soak
@SLURM
def test_a_job_over_its_memory_gets_more(faked: Project, profile: tuple[str, ...]) -> None:
    """Slurm ends it; the second attempt asks for twice as much, and all else is made."""
    (faked.folder / "once-prepare_dataset").write_text(
        f"{sys.executable} -c \"import time; x = b'x' * 1400 * 2**20; time.sleep(30)\"\n"
    )
    faked.snakemake(*profile, "--", DATASET)
    first, second = submitted(faked)
    assert first["JobState"] in ("FAILED", "OUT_OF_MEMORY", "CANCELLED")
    assert second["JobState"] == "COMPLETED"
    assert memory_mb(first["MinMemoryNode"]) == 1024
    assert memory_mb(second["MinMemoryNode"]) == 2048


def test_of_a_job_that_slurm_refuses_the_others_go_on(faked: Project) -> None:
    """What runs ends well and holds no lock; the message names the rule and what it asks for."""
    for name in "ab":
        text = CONFIG.format(launch="num_processes: 1").replace("run: tiny", f"run: {name}")
        faked.configure(name, text)
    faked.configure("config", "runs: [config/a.yaml, config/b.yaml]\n")
    (faked.folder / "once-prepare_dataset").write_text("sleep 12\n")
    more = ("--set-resources", "build_base:mem_mb=99999999", "--retries", "1")
    bases = [f"results/{name}/base/manifest.json" for name in "ab"]
    said = faked.start(*PROFILE, *more, "--", *bases).end(1)
    assert said.count("ERROR: build_base: Slurm refuses the job: Memory specification can") == 2
    assert said.count("It asks for mem_mb=99999999, runtime=120\n") == 2
    assert "sbatch call" not in said
    assert "2 of 4 stages failed" in said
    assert not faked.cluster.jobs(running=True)
    datasets = [f"results/data/{name}/manifest.json" for name in "ab"]
    assert "Nothing to be done" in faked.snakemake("--cores", "1", "--", *datasets)


@SLURM_AND_GENERIC
def test_a_cancelled_job_is_submitted_again(faked: Project, profile: tuple[str, ...]) -> None:
    """scancel is a failure to Snakemake; where it has retries left, a new job does the work."""
    (faked.folder / "once-prepare_dataset").write_text("sleep 600\n")
    running = faked.start(*profile, "--", DATASET)
    wait_until((faked.folder / "done-prepare_dataset").exists, "the job")
    (job,) = faked.cluster.jobs(running=True)
    faked.cluster.ask("scancel", job)
    running.end()
    states = [one["JobState"] for one in submitted(faked)]
    assert states in (["CANCELLED", "COMPLETED"], ["FAILED", "COMPLETED"])


@pytest.mark.soak
def test_a_dead_nodes_job_starts_again_on_another_node(faked: Project) -> None:
    """Under its own id, without a retry: Snakemake need not know."""
    (faked.folder / "once-prepare_dataset").write_text("sleep 600\n")
    running = faked.start(*PROFILE, "--retries", "0", "--", DATASET)
    wait_until((faked.folder / "done-prepare_dataset").exists, "the job")
    (before,) = submitted(faked)
    faked.cluster.kill_node(before["NodeList"])
    faked.cluster.ask(
        *("scontrol", "update", f"nodename={before['NodeList']}", "state=down", "reason=dead")
    )
    running.end()
    (after,) = submitted(faked)
    assert after["JobId"] == before["JobId"]
    assert (before["Restarts"], after["Restarts"]) == ("0", "1")
    assert after["NodeList"] != before["NodeList"]


@SLURM
def test_ctrl_c_ends_the_jobs(faked: Project, profile: tuple[str, ...]) -> None:
    """And Snakemake's lock is gone: the same command makes what is missing."""
    (faked.folder / "once-prepare_dataset").write_text("sleep 600\n")
    running = faked.start(*profile, "--", DATASET)
    wait_until((faked.folder / "done-prepare_dataset").exists, "the job")
    running.process.send_signal(signal.SIGINT)
    running.end(1)
    wait_until(lambda: not faked.cluster.jobs(), "the end of its jobs")
    assert [job["JobState"] for job in submitted(faked)] == ["CANCELLED"]
    faked.snakemake(*profile, "--", DATASET)
    assert [job["JobState"] for job in submitted(faked)] == ["CANCELLED", "COMPLETED"]


@pytest.mark.soak
@SLURM
def test_sigterm_lets_the_job_end(faked: Project, profile: tuple[str, ...]) -> None:
    """Snakemake submits nothing more, and ends with what ran; a second call makes the rest."""
    (faked.folder / "once-prepare_dataset").write_text("while [ ! -e go ]; do sleep 0.1; done\n")
    running = faked.start(*profile, "--", *INPUTS[1:])
    wait_until((faked.folder / "done-prepare_dataset").exists, "the job")
    running.process.send_signal(signal.SIGTERM)
    (faked.folder / "go").touch()
    said = running.end(1)
    assert "Will exit after finishing currently running jobs" in said
    assert said.count(": done in ") == 1
    assert "stopped: on request, 3 stages did not run; run the same command to continue" in said
    assert [job["JobState"] for job in submitted(faked)] == ["COMPLETED"]
    faked.snakemake(*profile, "--", DATASET)
    assert len(submitted(faked)) == 1


@pytest.mark.soak
def test_the_generic_profile_trains_what_this_machine_does(project: Project) -> None:
    """Training and weights are jobs of sbatch; every bit is the local run's."""
    for run, words in {"local": ("--cores", "2"), "submitted": (*GENERIC, *NO_GPUS)}.items():
        project.configure(run, REAL.format(run=run))
        made = f"results/{run}/plain/weights/manifest.json"
        project.snakemake(*words, "--configfile", f"config/{run}.yaml", "--", made)
    jobs = submitted(project)
    assert [job["JobName"] for job in jobs][-2:] == ["train_phase", "export_weights"]
    assert {job["JobState"] for job in jobs} == {"COMPLETED"}
    phases = [project.folder / "results" / run / "plain" for run in ("submitted", "local")]
    assert torch.equal(*map(weights, phases))
    assert project.steps("submitted/plain") == project.steps("local/plain") == [*range(1, 9)]


def test_the_profile_of_cluster_check_runs_jobs(faked: Project) -> None:
    """Written from what this cluster says, it plans the whole run and makes the data by a job in
    the partition that it names. Without accounting the executor finds no account, and continues."""
    checked = subprocess.run(
        [sys.executable, "-m", "zerotrain", "cluster", "check", "--output", "profiles/mine"],
        cwd=faked.folder, env=faked.environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    problems = re.findall("^problem (.*)", checked.stdout, re.M)
    assert all("but torch finds none" in one for one in problems)  # GPUs are fake
    assert "ok      the project's folder is shared" in checked.stdout
    mine = ("--profile", "profiles/mine", *PROFILE[2:])
    assert planned(faked, mine)["slurm_partition"] == "cpu"
    said = faked.snakemake(*mine, "--", DATASET)
    assert "Unable to guess SLURM account. Trying to proceed without." in said
    (trial, job) = (
        *faked.cluster.ask("squeue", "-h", "-t", "all", "-n", "cluster-check", "-o", "%T").split(),
        submitted(faked)[-1],
    )
    assert trial == "COMPLETED"
    assert (job["JobState"], job["Partition"]) == ("COMPLETED", "cpu")
    assert memory_mb(job["MinMemoryNode"]) == 1024


GRID_ENGINE = {
    "qsub": "for script; do :; done\n"
    '(setsid sh -c \'echo $$ >job-pid; exec sh "$0"\' "$script"; echo $? >job-ended) '
    ">job-said 2>&1 &\necho 71\n",
    "qstat": "[ ! -e job-ended ]\n",
    "qacct": "printf 'failed 0\\nexit_status %s\\n' \"$(cat job-ended)\"\n",
}
"""Stand-ins; a job is a group of processes, as to Grid Engine."""
LISTENS = """\
{python} -c "
import pathlib, time
from zerotrain.training.process.stop import StopRequest
warned = StopRequest(pathlib.Path())
pathlib.Path('listens').touch()
while not warned():
    time.sleep(0.1)
time.sleep(2)
pathlib.Path('warned').touch()
"
"""


def test_grid_engines_warning_leaves_the_job_its_time(faked: Project) -> None:
    """SIGUSR1 to all processes of a job: the stage hears it, and the shell and the Snakemake around
    it live until it has ended in order."""
    for name, script in GRID_ENGINE.items():
        path = faked.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
    (faked.folder / "once-prepare_dataset").write_text(LISTENS.format(python=sys.executable))
    words = ("--profile", "profiles/sge", "--latency-wait", "5", "--retries", "0")
    running = faked.start(*words, "--", DATASET)
    wait_until((faked.folder / "listens").exists, "the job")
    os.killpg(int((faked.folder / "job-pid").read_text()), signal.SIGUSR1)
    assert "prepare_dataset tiny: done in " in running.end()
    assert (faked.folder / "warned").exists()
    assert (faked.folder / "job-ended").read_text() == "0\n"
