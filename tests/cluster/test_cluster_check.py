"""`zerotrain cluster check`: what Slurm's answers become, in words and as a profile.

recorded/virtual is the virtual cluster. recorded/alps was answered by a real controller whose nodes
existed in its configuration alone: typed GPUs, several partitions, a drained node, MinJobAge 60.
"""

from __future__ import annotations

import grp
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.cluster.conftest import wait_until
from tests.cluster.virtual_slurm import NODES, VirtualSlurm
from typer.testing import CliRunner

from zerotrain import cli
from zerotrain.config.read import read_config
from zerotrain.graph.cluster import findings
from zerotrain.graph.cluster.findings import of_trial
from zerotrain.graph.cluster.profile import GPU_RULES, NO_GPU_RULES, TRAINING
from zerotrain.graph.cluster.slurm import (
    Cluster,
    Partition,
    ask_slurm,
    parse_accounts,
    parse_gres,
    parse_minutes,
)
from zerotrain.graph.cluster.trial import Trial, try_job

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
            # The same books hold another cluster's accounts as well.
            "sacctmgr": f"case $* in *cluster={name}*) ;; *) printf 'theirs|theirs|1\\n' ;; esac\n"
            f"printf '{books}'"
            if books
            else NO_BOOKS,
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
    monkeypatch.setattr(findings, "machine_memory", lambda *_, **__: {"train_phase": 2**30})


def change_answers(commands: Path, script: str) -> None:
    """Change what scontrol answers by a script of sed."""
    scontrol = commands / "scontrol"
    scontrol.write_text(f"{scontrol.read_text().rstrip()} | sed -E '{script}'\n")


def check(*words: str | Path) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(cli.command_line(), ["cluster", "check", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["alps", "virtual"])
def test_a_cluster_becomes_sentences_and_a_profile(
    name: str, recorded: Recorded, tmp_path: Path, generated: Callable[[Path, str], None]
) -> None:
    """All that is printed and written of two clusters, held as golden files."""
    recorded(name)
    code, said = check("--no-job", "--output", tmp_path / "mine")
    assert code == 0
    generated(GOLDEN / f"{name}.txt", said.replace(str(tmp_path), "profiles"))
    generated(GOLDEN / f"{name}.yaml", (tmp_path / "mine/config.yaml").read_text())


def without_reason(profile: Path, *, shared: bool) -> list[str]:
    """Entries of a profile without a comment above them, but for rules, whose values have theirs.

    Args:
        profile: The file.
        shared: Whether a comment holds for all that follows without a gap, at its depth or deeper.
    """
    bare, reason = [], None
    for line in profile.read_text(encoding="utf-8").splitlines():
        depth = len(line) - len(line.lstrip())
        if not line:
            reason = None
        elif line.lstrip().startswith("#"):
            reason = depth
        elif re.match(r" *[\w-]+:", line):
            if (reason is None or depth < reason) and not re.fullmatch(r"  \w+:", line):
                bare.append(line.strip())
            reason = reason if shared else None
    return bare


@pytest.mark.parametrize("name", ["alps", "virtual"])
def test_each_line_of_a_profile_has_its_reason(
    name: str, recorded: Recorded, tmp_path: Path
) -> None:
    """A comment of its own stands above each entry."""
    recorded(name)
    check("--no-job", "--output", tmp_path)
    file = tmp_path / "config.yaml"
    assert yaml.safe_load(file.read_text())["executor"] == "slurm"
    assert without_reason(file, shared=False) == []


def test_profiles_know_the_rules_that_become_jobs() -> None:
    """Those that are not local; on a cluster with a partition of CPUs each has its place."""
    texts = [path.read_text() for path in [ROOT / "Snakefile", *(ROOT / "rules").glob("*.smk")]]
    made = r"^rule (\w+):|^ *use rule \w+ as (\w+)"
    rules = {"".join(names) for text in texts for names in re.findall(made, text, re.M)}
    blocks = [
        block
        for text in texts
        for block in re.findall(r"^localrules:\n(.*?)\n\n", text, re.M | re.S)
    ]
    local = {name for block in blocks for name in re.findall(r"\w+", block)}
    assert {TRAINING, *GPU_RULES, *NO_GPU_RULES} == rules - local


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


@pytest.mark.parametrize(
    ("closing", "refusal"),
    [
        ("s/AllowGroups=ALL/AllowGroups=wheel9,admin9/", "only for groups wheel9,admin9"),
        ("s/RootOnly=NO/RootOnly=YES/", "for the administrator alone"),
        ("s/ReqResv=NO/ReqResv=YES/", "only within a reservation"),
        ("s/AllowAccounts=[a-z,]*/DenyAccounts=vision,physics/", "not for account physics"),
    ],
)
def test_a_partition_that_is_closed_is_not_chosen(
    closing: str, refusal: str, recorded: Recorded
) -> None:
    """As h100 would be, were it not closed to this user; and it is reported why."""
    commands = recorded("alps")
    own = grp.getgrgid(os.getegid()).gr_name
    ours = f"s/AllowGroups=ALL/AllowGroups=admin9,{own}/"
    change_answers(commands, f"/Name=h100/{closing}; /Name=a100/{ours}")
    assert "trainings go to a100, other jobs to batch" in check("--no-job")[1]
    with pytest.raises(cli.PipelineError, match="has not a partition 'h100'") as what:
        check("--no-job", "--partition", "h100")
    assert f"h100 ({refusal})" in what.value.what


def test_jobs_that_are_soon_forgotten(recorded: Recorded, tmp_path: Path) -> None:
    """Without accounting an end may be missed; the first look comes so soon that the executor does
    not turn to sacct, which would not answer."""
    commands = recorded("alps")
    (commands / "sacct").write_text(f"#!/bin/sh\n{NO_BOOKS}\n")
    _, said = check("--no-job", "--output", tmp_path)
    assert "warn    Slurm forgets a job 60 s after its end (MinJobAge)" in said
    assert "asks every 180 s or less" in said
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["slurm-init-seconds-before-status-checks"] == 20
    assert written["slurm-status-command"] == "squeue"
    change_answers(commands, "s/= 60 sec/= 180 sec/")
    _, said = check("--no-job", "--output", tmp_path, "--force")
    assert "MinJobAge" not in said
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert "slurm-init-seconds-before-status-checks" not in written


def test_memory_is_ended_only_where_slurm_says_so(recorded: Recorded) -> None:
    """Control groups alone end no job: cgroup.conf says whether they do."""
    ended = "ok      a job that takes more memory than it asked for is ended"
    commands = recorded("alps")
    assert ended not in check("--no-job")[1]
    constrain = "s/(ConstrainRAMSpace *= )no/\\1yes/"
    change_answers(commands, constrain)
    assert ended in check("--no-job")[1]


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
    """What was asked and what Slurm printed."""
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
            findings, "machine_memory", lambda *_, needed=needed, **__: {"train_phase": needed}
        )
        found = [one for one in findings.of_phases(run, partition) if "memory" in one.text]
        assert [one.level for one in found] == [level] * len(run.phases)
        assert "has 498.0 GiB" in found[0].text or "nodes of 498.0 GiB" in found[0].text


def test_a_login_nodes_cores_are_no_number_to_rely_on(
    recorded: Recorded, small_model: None
) -> None:
    """Threads that no one set are those of the machine that renders."""
    recorded("alps")
    _, said = check("--no-job", ROOT / "config/sdxl-lora-24gb.yaml")
    assert "num_cpu_threads_per_process is not set" in said
    assert "192 or less fits a node of h100 with 192 CPUs" in said


@pytest.mark.slow
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


def test_a_node_that_has_much_to_say_is_heard(
    recorded: Recorded, alps: Cluster, tmp_path: Path
) -> None:
    """More on stderr than a pipe holds; the last line says why it failed."""
    noise = "head -c 200000 /dev/zero | tr '\\0' x >&2; echo >&2; echo 'the reason' >&2"
    (recorded("alps") / "srun").write_text(f"#!/bin/sh\n{noise}\necho '{{}}'\nexit 3\n")
    assert try_job(alps.partitions[0], tmp_path, None, 5.0).failure == "the reason"


def test_what_stops_a_training_on_a_node_is_a_problem(alps: Cluster) -> None:
    """Clock, folder, torch, and a Python that is not there, each by its sentence."""
    partition = next(one for one in alps.partitions if one.name == "h100")
    told = {
        "time": 0.0, "host": "h1", "asked_after": None, "temporary": "/tmp",
        "temporary_free": 10**9, "hub": "no route", "torch": "", "machine": "CPU",
        "accelerator": "cpu", "unused": "",
    }  # fmt: skip
    trial = Trial(["srun", "python"], told, skew_seconds=-7.25)
    found = {one.text: one.level for one in of_trial(trial, partition)}
    assert found.pop("its clock is 7.2 s behind this one: Snakemake takes files for older than "
                     "they are") == "problem"  # fmt: skip
    assert found.pop("the node does not see a file that was written here") == "problem"
    assert found.pop("compute nodes do not reach the hub (no route)") == "warn"
    assert found.pop("a job's own disk, /tmp, has 1 GB free") == "warn"
    assert any(said.startswith("torch computes on the CPU there") for said in found)
    away = Trial(["srun", "python"], failure="slurmstepd: error: execve(): /x/python: No such file")
    (only,) = of_trial(away, partition)
    assert only.level == "problem"
    assert "execve(): /x/python" in only.text


REFUSED = "srun: error: Unable to allocate resources: "


@pytest.mark.parametrize(
    ("said", "level"),
    [
        ("Requested nodes are busy", "warn"),
        ("Immediate execution impossible, insufficient priority", "warn"),
        ("Invalid partition name specified", "problem"),
        ("Requested node configuration is not available", "problem"),
        ("Requested partition configuration not available now", "problem"),
        ("Required node not available (down, drained or reserved)", "problem"),
        ("Partition in DOWN state", "problem"),
        ("Access/permission denied", "problem"),
    ],
)
def test_only_full_nodes_are_worth_a_wait(alps: Cluster, said: str, level: str) -> None:
    """What srun of Slurm 22.05 says; a job that is refused will never run."""
    (only,) = of_trial(Trial(["srun"], failure=f"{REFUSED}{said}"), alps.partitions[0])
    assert only.level == level
    assert said in only.text
    assert "Python" not in only.text


@pytest.mark.slow
def test_srun_itself_refuses_and_lets_wait(
    cluster: VirtualSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the virtual cluster: no such partition, and nodes that are all taken."""
    monkeypatch.setenv("PATH", cluster.environment["PATH"])
    (cpu, *_) = ask_slurm().partitions

    def tried(partition: Partition) -> str:
        (only,) = of_trial(try_job(partition, tmp_path, None, 1.0), partition)
        return f"{only.level} {only.text}"

    invalid = f"problem Slurm refuses a trial job: {REFUSED}Invalid partition name specified"
    assert tried(replace(cpu, name="nowhere")) == invalid
    for _ in NODES:
        cluster.ask("sbatch", "--exclusive", "--output=/dev/null", "--wrap", "sleep 60")
    wait_until(lambda: len(cluster.jobs(running=True)) == len(NODES), "all nodes to be taken")
    assert tried(cpu) == f"warn no node was free for a trial: {REFUSED}Requested nodes are busy"


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


@pytest.mark.soak
def test_snakemake_takes_the_profile_as_it_is(recorded: Recorded, project: Path) -> None:
    """A dry run names partition, limit and signal of each rule as they were written, also where
    Snakemake would evaluate a name as Python; and a type of GPU as docs/hpc.md asks for it."""
    commands = recorded("alps")
    renamed = "s/([=,])h100([ ,])/\\1gpu.long\\2/g; s/([=,])batch([ ,])/\\1all\\2/g"
    change_answers(commands, renamed)
    check("--no-job", "--output", project / "profiles/mine")
    typed = re.search(r"gres: \"'gpu:a100.*\"", (ROOT / "docs/hpc.md").read_text())
    assert typed
    file = project / "profiles/mine/config.yaml"
    text = file.read_text().replace("runtime: 2160", f"runtime: 2160\n    {typed[0]}")
    file.write_text(text.replace("'main'", "'offload'"))
    snakemake = Path(sys.executable).with_name("snakemake")
    done = subprocess.run(
        [snakemake, "--profile", "profiles/mine", "-n", "--verbose"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    shown = dict(block.split(":", 1) for block in done.stdout.split("\nrule ")[1:])
    for rule, words in {
        "train_phase": "slurm_partition=gpu.long runtime=2160 slurm_extra=--signal=TERM@120 "
        "gres=gpu:a100:4",
        "export_weights": "slurm_partition=all slurm_account=physics runtime=60",
    }.items():
        resources = shown[rule].partition("resources:")[2].partition("\n")[0].split(", ")
        assert set(words.split()) <= {one.strip() for one in resources}


PROFILES = sorted(path.parent.name for path in ROOT.glob("profiles/*/config.yaml"))


@pytest.mark.parametrize("name", PROFILES)
def test_each_line_of_our_profiles_has_its_reason(name: str) -> None:
    """As of those that are written; here neighbours may share one, and a rule's values its own."""
    assert without_reason(ROOT / "profiles" / name / "config.yaml", shared=True) == []


ENGINES = ("lsf", "sge", "htcondor", "kubernetes")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_profile_of_another_engine_says_that_it_was_never_run(engine: str) -> None:
    """In its first lines."""
    lines = (ROOT / "profiles" / engine / "config.yaml").read_text().splitlines()
    head = " ".join(line.lstrip("# ") for line in lines[: lines.index("")])
    assert "This profile has never been run" in head
    rules = yaml.safe_load("\n".join(lines))["set-resources"]
    assert set(rules) == {"train_phase", "cache_latents", "encode_shard", "evaluate"}
    assert all((ROOT / f"rules/{rule}.smk").is_file() for rule in rules)


def state(profile: str, commands: Path, **scripts: str) -> str:
    """What a profile's status.sh says of job 71, with stand-ins for the engine's commands."""
    for name, script in scripts.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    done = subprocess.run(
        [ROOT / "profiles" / profile / "status.sh", "71"],
        env={"PATH": f"{commands}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_slurms_words_become_states(tmp_path: Path) -> None:
    """profiles/cluster-generic/status.sh: a state is final or not; jobs that Slurm has forgotten,
    and a controller that does not answer."""
    shown = partial(state, "cluster-generic", tmp_path)
    record = "echo 'JobId=71 JobName=train JobState={} Reason=None Dependency=(null)'".format
    states = {
        "running": "PENDING CONFIGURING RUNNING SUSPENDED STOPPED COMPLETING STAGE_OUT REQUEUED "
        "REQUEUE_HOLD RESIZING SIGNALING",
        "success": "COMPLETED",
        "failed": "BOOT_FAIL CANCELLED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED "
        "SPECIAL_EXIT TIMEOUT",
    }
    for wanted, names in states.items():
        found = {name: shown(scontrol=record(name)) for name in names.split()}
        assert found == dict.fromkeys(names.split(), wanted)
    forgotten = '[ "$1" = ping ]'
    assert shown(scontrol=forgotten, squeue="exit 1", sacct="echo ' COMPLETED '") == "success"
    assert shown(scontrol=forgotten, squeue="exit 1", sacct="exit 1") == "failed"
    assert shown(scontrol="exit 1", squeue="exit 1", sacct="exit 1") == "running"


def test_grid_engines_words_become_states(tmp_path: Path) -> None:
    """profiles/sge/status.sh: queued, held by an error, ended well, killed."""
    gone = "exit 1"
    assert state("sge", tmp_path, qstat="echo '71 0.5 train me qw 11/23/2026'") == "running"
    assert state("sge", tmp_path, qstat="echo '71 0.5 train me Eqw 11/23/2026'") == "failed"
    ended = "printf 'failed       0\nexit_status  {}\n'"
    assert state("sge", tmp_path, qstat=gone, qacct=ended.format(0)) == "success"
    assert state("sge", tmp_path, qstat=gone, qacct=ended.format(137)) == "failed"
