"""What Slurm says of a job decides who holds a lock, and where a training runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.builders.phases import make_phase
from tests.builders.refusals import refusal

from zerotrain.errors import PipelineError
from zerotrain.launch.files import SRUN
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import slurm_job as job
from zerotrain.machine.ports import port_of_job
from zerotrain.machine.processes import this_process
from zerotrain.machine.slurm_job import Job, address_of_first, ask, runs, this_job
from zerotrain.training.process import lock, machines
from zerotrain.training.process.lock import take

LINE = (
    "JobId=71 JobName=a b UserId=me(1) Priority=1 JobState={state} Reason=None Requeue=1 "
    "Restarts=2 BatchFlag=1 Partition=gpu NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=8\n"
)
GONE = "slurm_load_jobs error: Invalid job id specified"
DEAF = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"

Slurm = Callable[..., None]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Puts a scontrol first on PATH that answers as one did, or says why it does not."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def answer(state: str = "RUNNING", error: str = "") -> None:
        shown = f"echo '{error}' >&2; exit 1" if error else f"printf '{LINE.format(state=state)}'"
        script = folder / "scontrol"
        script.write_text(
            '#!/bin/sh\ncase "$2" in\n'
            f"job) {shown} ;;\n"
            "config) printf 'ClusterName             = alps\\n' ;;\n"
            "hostnames) printf 'n1\\nn2\\n' ;;\n"
            "node) echo 'NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 Port=6818' ;;\n"
            "esac\n"
        )
        script.chmod(0o755)

    return answer


def phase(**changes: object) -> ResolvedPhase:
    """A phase of four processes on two machines."""
    return make_phase(**{"num_processes": 4, "machines": 2, **changes})


def test_a_job_is_read_from_what_scontrol_shows(slurm: Slurm) -> None:
    """State, restarts and nodes; a name with a blank disturbs nothing."""
    slurm()
    assert ask("71") == (Job("71", "RUNNING", 2, 2, "n[1-2]"), True)
    slurm(error=GONE)
    assert ask("71") == (None, True)
    slurm(error=DEAF)
    assert ask("71") == (None, False)
    slurm(error="", state="' >/dev/null; printf '")  # nothing, and no error
    assert ask("71") == (None, False)


def test_without_a_job_slurm_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without Slurm nothing is called."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(job.subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    assert this_job() is None
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    assert ask("71") == (None, False)


@pytest.mark.parametrize(
    ("state", "error", "running"),
    [
        ("RUNNING", "", True),
        ("COMPLETING", "", True),
        ("SUSPENDED", "", True),
        ("PENDING", "", False),  # requeued: its processes have ended
        ("TIMEOUT", "", False),
        ("NODE_FAIL", "", False),
        ("CANCELLED", "", False),
        ("", GONE, False),
        ("", DEAF, None),
    ],
)
def test_whether_a_job_runs(slurm: Slurm, state: str, error: str, running: bool | None) -> None:
    """Only what Slurm says of its own jobs is believed; a silent controller says nothing."""
    slurm(state, error)
    assert runs("71", "alps") is running
    assert runs("71", "") is running
    assert runs("71", "pyrenees") is None


def test_that_slurm_does_not_know_a_job_counts_for_ones_own_alone(
    tmp_path: Path, slurm: Slurm
) -> None:
    """With PrivateData=jobs it says so of other users' jobs that run. Whoever shares the folder is
    refused their lock."""
    slurm(error=GONE)
    assert runs("71", "alps", own=False) is None
    held_on_another_machine(tmp_path, user=os.getuid() + 1)
    with pytest.raises(PipelineError, match="pid 1 on n9, job 71"):
        take(tmp_path)
    held_on_another_machine(tmp_path, user=os.getuid())
    take(tmp_path).release()
    slurm("TIMEOUT")
    assert runs("71", "alps", own=False) is False


def held_on_another_machine(progress: Path, **changes: object) -> None:
    """A lock whose owner is a job on another machine."""
    values = {"host": "n9", "pid": 1, "started": 0.0, "job": "71", "cluster": "alps", **changes}
    owner = replace(this_process(), **values)  # type: ignore[arg-type]
    (progress / lock.LOCK).write_text(json.dumps(asdict(owner)))


def test_the_lock_of_a_job_that_ended_is_taken_over(tmp_path: Path, slurm: Slurm) -> None:
    """A time limit's SIGKILL leaves the lock; the retry is another job, on another machine."""
    held_on_another_machine(tmp_path)
    slurm("TIMEOUT")
    take(tmp_path).release()
    for state, error in (("RUNNING", ""), ("", DEAF)):
        held_on_another_machine(tmp_path)
        slurm(state, error)
        text = refusal(take, tmp_path)
        assert "pid 1 on n9, job 71, since 1970" in text
        assert f"stop it with `touch {tmp_path}/stop` or `scancel 71`" in text


def test_a_requeued_job_knows_its_earlier_start(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snakemake's jobstep hides the count of restarts from us; scontrol has it."""
    slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alps")
    held_on_another_machine(tmp_path, restart=1)
    take(tmp_path).release()
    held_on_another_machine(tmp_path, restart=2)
    with pytest.raises(PipelineError, match="pid 1 on n9, job 71"):
        take(tmp_path)


def test_a_phase_of_several_machines_takes_those_of_its_job(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launcher on each, by the rendered line; they meet on the first node, at a port that
    follows from the job and the phase."""
    slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    (tmp_path / "accelerate.yaml").write_text("num_machines: 2\n")
    found, said = machines.job_of(phase())
    assert found is not None
    assert said == []
    assert address_of_first(found) == "10.0.0.1"
    words = machines.launcher(phase(), tmp_path, tmp_path / "progress", found)
    assert words[:2] == ["sh", str(tmp_path / SRUN)]
    port = str(port_of_job("71", "", "cats/plain"))
    assert words[-4:] == ["--main_process_ip", "10.0.0.1", "--main_process_port", port]
    other = machines.launcher(phase(phase="other"), tmp_path, tmp_path / "progress", found)
    assert other[-1] != port
    (tmp_path / "accelerate.yaml").write_text("num_machines: 2\nmain_process_port: 29500\n")
    words = machines.launcher(phase(), tmp_path, tmp_path / "progress", found)
    assert words[-1] == "29500"


def test_without_enough_machines_all_processes_run_on_this_one(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same phase, which says so; the launch file's number of machines is overruled."""
    slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    (tmp_path / "accelerate.yaml").write_text("num_machines: 3\n")
    three = phase(machines=3, num_processes=6)
    found, said = machines.job_of(three)
    assert found is None
    assert said == ["plain: machines 3, but job 71 has 2: all 6 processes run on this machine"]
    words = machines.launcher(three, tmp_path, tmp_path / "progress", None)
    assert words[words.index("--num_machines") + 1] == "1"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert machines.job_of(phase())[1] == [
        "plain: machines 2, but this is no job of Slurm: all 4 processes run on this machine"
    ]
    assert machines.job_of(phase(machines=1)) == (None, [])
    words = machines.launcher(phase(machines=1), tmp_path, tmp_path / "progress", None)
    assert "--num_machines" not in words


def test_within_a_job_a_silent_slurm_is_no_missing_one(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else four processes would share the first of two machines that wait for them."""
    slurm(error=DEAF)
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    assert "Slurm does not say which those of job 71 are" in refusal(machines.job_of, phase())
    assert machines.job_of(phase(machines=1)) == (None, [])
