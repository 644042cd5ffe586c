"""`zerotrain cluster check`: what Slurm's answers become, in words and as a profile.

recorded/virtual is the virtual cluster. recorded/alps was answered by a real controller whose nodes
existed in its configuration alone: typed GPUs, several partitions, a drained node, MinJobAge 60.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from zerotrain import cli
from zerotrain.cluster import phases
from zerotrain.cluster.findings import of_trial
from zerotrain.cluster.slurm import (
    Cluster,
    ask_slurm,
    parse_accounts,
    parse_gres,
    parse_minutes,
)
from zerotrain.cluster.trial import Trial, try_job
from zerotrain.config import read_config

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
GOLDEN = ROOT / "tests/golden/cluster"
BOOKS = {"alps": "physics|physics|40\\nvision|physics|\\n", "virtual": ""}
"""What sacctmgr prints; the virtual cluster keeps no books."""
Recorded = Callable[[str], Path]
NO_BOOKS = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Puts Slurm's commands first on PATH, which answer as a cluster did; srun runs its command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def answer(name: str) -> Path:
        says = RECORDED / name
        books = BOOKS[name]
        scripts = {
            "sinfo": f"cat {says}/version",
            "scontrol": f'cat "{says}/$2"',
            "sbatch": "exit 1",
            "sacct": "true" if books else NO_BOOKS,
            "sacctmgr": f"printf '{books}'" if books else NO_BOOKS,
            "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
        }
        for command, script in scripts.items():
            (folder / command).write_text(f"#!/bin/sh\n{script}\n")
            (folder / command).chmod(0o755)
        return folder

    return answer


@pytest.fixture
def alps(recorded: Recorded) -> Cluster:
    """The cluster with accounts, typed GPUs and several partitions."""
    recorded("alps")
    return ask_slurm()


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forecast of memory: 1 GiB for every phase."""
    monkeypatch.setattr(phases, "machine_memory", lambda *_, **__: {"train_phase": 2**30})


def check(*words: str | Path) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(cli.app, ["cluster", "check", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["alps", "virtual"])
def test_a_cluster_becomes_sentences_and_a_profile(
    name: str, recorded: Recorded, tmp_path: Path, generated: Callable[[Path, str], None]
) -> None:
    """All that is said and written of two clusters, held as golden files."""
    recorded(name)
    code, said = check("--no-job", "--output", tmp_path / "mine")
    assert code == 0
    generated(GOLDEN / f"{name}.txt", said.replace(str(tmp_path), "profiles"))
    generated(GOLDEN / f"{name}.yaml", (tmp_path / "mine/config.yaml").read_text())


@pytest.mark.parametrize("name", ["alps", "virtual"])
def test_each_line_of_a_profile_has_its_reason(
    name: str, recorded: Recorded, tmp_path: Path
) -> None:
    """A comment stands above each entry, but for rules and values that share one."""
    recorded(name)
    check("--no-job", "--output", tmp_path)
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert yaml.safe_load("\n".join(lines))["executor"] == "slurm"
    top = [n for n, line in enumerate(lines) if line[:1].isalpha()]
    assert all(lines[n - 1].startswith("#") for n in top)


def test_an_account_opens_a_partition(recorded: Recorded, tmp_path: Path) -> None:
    """h100 is for two accounts; a third one's trainings go to a100, and to no preempted one."""
    recorded("alps")
    code, said = check("--no-job", "--account", "chemistry", "--output", tmp_path)
    assert code == 0
    assert "trainings go to a100, other jobs to batch" in said
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["default-resources"]["slurm_partition"] == "a100"
    assert written["default-resources"]["slurm_account"] == "chemistry"
    assert written["set-resources"]["train_phase"]["runtime"] == 24 * 60


def test_a_partition_that_cancels_is_warned_of(recorded: Recorded) -> None:
    """The executor never learns of a job that was preempted with CANCEL."""
    recorded("alps")
    _, said = check("--no-job", "--partition", "scavenge")
    assert (
        "warn    jobs in scavenge may be preempted by debug, a100, h100 with PreemptMode=CANCEL"
        in said
    )
    assert "warn    scavenge has GPUs of several types (a100, h100)" in said


def test_no_slurm_and_no_such_partition_are_sentences(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing, what there is, and what to do."""
    recorded("alps")
    with pytest.raises(cli.PipelineError, match="has not a partition 'gpu'") as what:
        check("--no-job", "--partition", "gpu")
    assert "h100 (usable), scavenge (usable), old (not up)" in what.value.what
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(cli.PipelineError, match="no command 'sinfo'"):
        check("--no-job")


def test_a_profile_is_never_replaced_unasked(recorded: Recorded, tmp_path: Path) -> None:
    """It is refused before anything is asked; --force replaces it."""
    recorded("virtual")
    file = tmp_path / "config.yaml"
    file.write_text("executor: mine\n")
    with pytest.raises(cli.PipelineError, match="there already"):
        check("--no-job", "--output", tmp_path)
    assert file.read_text() == "executor: mine\n"
    check("--no-job", "--output", tmp_path, "--force")
    assert yaml.safe_load(file.read_text())["executor"] == "slurm"


def test_a_controller_that_is_silent_is_a_sentence(recorded: Recorded) -> None:
    """What was asked and what Slurm said."""
    folder = recorded("virtual")
    said = "slurm_load_ctl_conf error: Unable to contact slurm controller"
    (folder / "scontrol").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
    with pytest.raises(cli.PipelineError, match=f"`scontrol show config` fails: {said}"):
        check("--no-job")


def test_phases_are_held_against_nodes_and_cores(
    recorded: Recorded, tmp_path: Path, small_model: None
) -> None:
    """Two nodes of four GPUs are too many for h100's limit or number; threads are counted."""
    recorded("alps")
    config = tmp_path / "big.yaml"
    config.write_text(
        "run: big\nfamily: sdxl\nbase: micro\ndata: {source: digits}\n"
        "launch: {num_cpu_threads_per_process: 40}\ntrain: {global_batch_size: 32}\n"
        "phases:\n"
        "  - {name: one, until: 1, launch: {machines: 2, processes_per_machine: 4}}\n"
        "  - {name: two, until: 2, launch: {machines: 4, processes_per_machine: 8}}\n"
    )
    code, said = check("--no-job", config, "--account", "vision")
    assert code == 1
    assert "ok      phase one asks for 2 nodes with 4 GPUs; h100 has 2\n" in said
    assert (
        "problem phase two asks for 4 nodes with 8 GPUs; h100 has 2 such (GPUs 2 x 8 h100)" in said
    )
    assert "problem phase two: 8 x 40 CPU threads; a node of h100 has 192" in said
    assert "phase one takes " in said
    assert said.count("problem ") == 2
    assert "\n2 problems\n" in said


def test_a_phase_that_no_node_holds_is_a_problem(
    alps: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner's forecast against the largest node of the partition."""
    partition = next(one for one in alps.partitions if one.name == "a100")
    run = read_config(ROOT / "config/config.yaml")
    for needed, level in ((500 * 2**30, "problem"), (498 * 2**30, "ok")):
        monkeypatch.setattr(
            phases, "machine_memory", lambda *_, needed=needed, **__: {"train_phase": needed}
        )
        found = [one for one in phases.of_phases(run, partition) if "memory" in one.said]
        assert [one.level for one in found] == [level] * len(run.phases)
        assert "has 498.0 GiB" in found[0].said or "nodes of 498.0 GiB" in found[0].said


def test_a_login_nodes_cores_are_no_number_to_rely_on(
    recorded: Recorded, small_model: None
) -> None:
    """Threads that no one set are those of the machine that renders."""
    recorded("alps")
    _, said = check("--no-job", ROOT / "config/sdxl-lora-24gb.yaml")
    assert "num_cpu_threads_per_process is not set" in said
    assert "192 or less fits a node of h100 with 192 CPUs" in said


def test_a_trial_job_sees_the_folder_the_clock_and_torch(alps: Cluster, tmp_path: Path) -> None:
    """With a stand-in for srun that runs the job here: both files, both ways."""
    partition = next(one for one in alps.partitions if one.name == "batch")
    trial = try_job(partition, tmp_path, "physics", 5.0)
    assert trial.failure == ""
    assert "--account=physics" in trial.command
    assert "--gres=gpu:1" not in trial.command
    said = "\n".join(map(str, of_trial(trial, partition)))
    assert "the project's folder is shared" in said
    assert "ok      torch loads there" in said
    assert [*tmp_path.glob(".cluster-check-*")] == []


def test_what_stops_a_training_on_a_node_is_a_problem(alps: Cluster) -> None:
    """Clock, folder, torch, and a Python that is not there, each by its sentence."""
    partition = next(one for one in alps.partitions if one.name == "h100")
    told = {
        "time": 0.0, "host": "h1", "asked_after": None, "temporary": "/tmp",
        "temporary_free": 10**9, "hub": "no route", "torch": "", "machine": "CPU",
        "accelerator": "cpu", "unused": "",
    }  # fmt: skip
    trial = Trial(["srun", "python"], told, skew_seconds=-7.25)
    found = {one.said: one.level for one in of_trial(trial, partition)}
    assert found.pop("its clock is 7.2 s behind this one: Snakemake takes files for older than "
                     "they are") == "problem"  # fmt: skip
    assert found.pop("the node does not see a file that was written here") == "problem"
    assert found.pop("compute nodes do not reach the hub (no route)") == "warn"
    assert found.pop("a job's own disk, /tmp, has 1 GB free") == "warn"
    assert any(said.startswith("torch computes on the CPU there") for said in found)
    away = Trial(["srun", "python"], failure="slurmstepd: error: execve(): /x/python: No such file")
    (only,) = of_trial(away, partition)
    assert only.level == "problem"
    assert "execve(): /x/python" in only.said
    busy = Trial(["srun"], failure="srun: error: Unable to allocate resources: not available now")
    assert [one.level for one in of_trial(busy, partition)] == ["warn"]


def test_slurms_own_forms_are_read() -> None:
    """Limits, generic resources and the books, as the manuals show them."""
    assert parse_gres("gpu:a100:4(S:0-1),nvme:1") == {"a100": 4}
    assert parse_gres("gpu:h100:2(S:0),gpu:1g.10gb:7(S:1)") == {"h100": 2, "1g.10gb": 7}
    assert [parse_gres(text) for text in ("gpu:2", "gpu", "(null)", "shard:8")] == [
        {"": 2}, {"": 1}, {}, {},
    ]  # fmt: skip
    limits = [parse_minutes(text) for text in ("2-01:30:00", "00:20:00", "UNLIMITED", "NONE")]
    assert limits == [49 * 60 + 30, 20, None, None]
    assert parse_accounts("a|b|100\nb|b|7\nb|b|\n") == (("b", "a"), 7)


def test_nodes_that_take_no_jobs_are_left_out(alps: Cluster) -> None:
    """A drained one is; those that are powered down until they are needed are not."""
    a100 = next(one for one in alps.partitions if one.name == "a100")
    assert [node.name for node in a100.nodes] == ["g1", "g2", "g3"]
    assert a100.nodes[0].memory_mb == 510000


@pytest.fixture
def project(private_project: Callable[[str], Path]) -> Iterator[Path]:
    """A copy of the project in which snakemake may run."""
    folder = private_project("project")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_snakemake_takes_the_profile_as_it_is(recorded: Recorded, project: Path) -> None:
    """A dry run names partition, limit and signal of each rule as they were written, also where
    Snakemake would evaluate a name as Python."""
    commands = recorded("alps")
    renamed = "s/([=,])h100([ ,])/\\1gpu.long\\2/g; s/([=,])batch([ ,])/\\1all\\2/g"
    scontrol = commands / "scontrol"
    scontrol.write_text(f"{scontrol.read_text().rstrip()} | sed -E '{renamed}'\n")
    check("--no-job", "--output", project / "profiles/mine")
    snakemake = Path(sys.executable).with_name("snakemake")
    done = subprocess.run(
        [snakemake, "--profile", "profiles/mine", "-n"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    shown = dict(block.split(":", 1) for block in done.stdout.split("\nrule ")[1:])
    for rule, words in {
        "train_phase": "slurm_partition=gpu.long runtime=2160 slurm_extra=--signal=TERM@120",
        "export_weights": "slurm_partition=all slurm_account=physics runtime=60",
    }.items():
        resources = shown[rule].partition("resources:")[2].partition("\n")[0].split(", ")
        assert set(words.split()) <= {one.strip() for one in resources}


ENGINES = ("lsf", "sge", "htcondor", "kubernetes")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_profile_of_another_engine_says_that_nobody_ran_it(engine: str) -> None:
    """Its first lines, and a reason above each entry."""
    lines = (ROOT / "profiles" / engine / "config.yaml").read_text().splitlines()
    head = " ".join(line.lstrip("# ") for line in lines[: lines.index("")])
    assert "Nobody has run this profile" in head
    top = [n for n, line in enumerate(lines) if line[:1].isalpha()]
    assert all(lines[n - 1].startswith("#") for n in top)
    rules = yaml.safe_load("\n".join(lines))["set-resources"]
    assert set(rules) == {"train_phase", "cache_latents", "evaluate"}
    assert all((ROOT / f"rules/{rule}.smk").is_file() for rule in rules)


def test_grid_engines_words_become_states(tmp_path: Path) -> None:
    """profiles/sge/status.sh, with stand-ins: queued, held by an error, ended well, killed."""
    told = {"qstat": "", "qacct": ""}

    def state(**scripts: str) -> str:
        for name, script in {**told, **scripts}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        done = subprocess.run(
            [ROOT / "profiles/sge/status.sh", "71"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    gone = "exit 1"
    assert state(qstat="echo '71 0.5 train me qw 11/23/2026'") == "running"
    assert state(qstat="echo '71 0.5 train me Eqw 11/23/2026'") == "failed"
    ended = "printf 'failed       0\nexit_status  {}\n'"
    assert state(qstat=gone, qacct=ended.format(0)) == "success"
    assert state(qstat=gone, qacct=ended.format(137)) == "failed"
