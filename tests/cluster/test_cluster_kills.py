"""Time limits, preemption, dead nodes and a killed Snakemake: the same weights in the end.

A training is held (SIGSTOP) until what is to hit it is on its way, so that no step is too fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from safetensors import safe_open
from tests.cluster.conftest import NO_GPUS, PROFILE, Project, Snakemake, wait_until

pytestmark = pytest.mark.slow

CONFIG = """\
run: {run}
base: nano
data: {{name: digits, source: digits, holdout: 0.5}}
train:
  {{resolution: 32, global_batch_size: 32, learning_rate: 1.0e-3, save_every: 20, log_every: 1}}
launch: {{num_cpu_threads_per_process: 1}}
phases: [{{name: plain, until: 150}}]
"""
WEIGHTS = "results/{run}/plain/weights/manifest.json"
SUBMIT = (*PROFILE, *NO_GPUS, "train_phase:runtime=1", "train_phase:slurm_partition=preemptible",
          "train_phase:slurm_extra='--signal=TERM@5'", "--retries", "9")  # fmt: skip
"""The shortest limit that Slurm has, in a partition whose jobs others may drive away."""


INPUTS = ("--configfile", "config/disturbed.yaml", "--", "base", "cache", "launch")
"""What the training reads: made here, where jobs need not queue for it."""


def arguments(run: str, *words: str) -> list[str]:
    """Of a `snakemake` that makes a run's weights."""
    return [*words, "--configfile", f"config/{run}.yaml", "--", WEIGHTS.format(run=run)]


def tensors(project: Project, run: str) -> dict[str, bytes]:
    """The trained weights by name, as bytes."""
    path = project.folder / f"results/{run}/plain/weights/unet/diffusion_pytorch_model.safetensors"
    with safe_open(path, "np") as found:
        return {name: found.get_tensor(name).tobytes() for name in found.keys()}  # noqa: SIM118


@contextlib.contextmanager
def held(project: Project, step: int, *, always: bool = False) -> Iterator[None]:
    """A training process that stands still from a step on, until the block ends.

    Args:
        project: The project; its run is `disturbed`.
        step: Where it is stopped at the earliest.
        always: Stop it again should somebody else let it continue.
    """
    project.wait_for_step("disturbed/plain", step)
    (pid,) = project.ranks("disturbed/plain")
    over = threading.Event()

    def stop() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            while always and not over.wait(0.02):
                os.kill(pid, signal.SIGSTOP)

    holding = threading.Thread(target=stop)
    holding.start()
    try:
        yield
    finally:
        over.set()
        holding.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def warn(project: Project, snakemake: Snakemake, seen: int, saved: int) -> tuple[int, int]:
    """Let Slurm warn a job of its time limit; what was seen and saved then."""
    with held(project, seen + 10):
        assert first_step(project) >= saved
        (warned,) = project.cluster.jobs(running=True)
        wait_until(
            (project.progress("disturbed/plain") / "stop").exists, "the warning before the limit"
        )
    wait_until(lambda: warned not in project.cluster.jobs(), "the end of the warned job")
    assert state_of(project, warned) == "FAILED"  # unfinished, 85
    assert "plain: unfinished: stopped on request" in log(project)
    return (newest_checkpoint(project),) * 2


def exceed(project: Project, snakemake: Snakemake, seen: int, saved: int) -> tuple[int, int]:
    """Let a job reach its time limit, which kills it."""
    with held(project, seen + 10, always=True):
        assert first_step(project) >= saved
        (limited,) = project.cluster.jobs(running=True)
        wait_until(lambda: limited not in project.cluster.jobs(), "the time limit")
    assert state_of(project, limited) == "TIMEOUT"
    return max(project.steps("disturbed/plain")), newest_checkpoint(project)


def preempt(project: Project, snakemake: Snakemake, seen: int, saved: int) -> tuple[int, int]:
    """Drive a job away; it ends within its grace time, and the next one trains further."""
    with held(project, seen + 10):
        assert first_step(project) >= saved
        (preempted,) = project.cluster.jobs(running=True)
        quietly = ("--wait", "--output=/dev/null", "--wrap", "true")
        project.cluster.ask("sbatch", "-p", "cpu", "-N2", "--exclusive", *quietly)
    saved = newest_checkpoint(project)
    project.wait_for_step("disturbed/plain", saved + 5)
    assert state_of(project, preempted) == "FAILED"  # unfinished within the grace time
    return saved, saved


def orphan(project: Project, snakemake: Snakemake, seen: int, saved: int) -> tuple[int, int]:
    """Kill Snakemake: the job trains to its end, and a second one is refused meanwhile."""
    with held(project, seen + 10):
        assert first_step(project) >= saved
        (last,) = project.cluster.jobs(running=True)
        snakemake.process.kill()
        snakemake.end(-9)
        project.snakemake("--unlock", "--configfile", "config/disturbed.yaml")
        refused = project.snakemake(*arguments("disturbed", *SUBMIT), code=2)
        assert "a training is running here already: pid " in refused
        assert f", job {last}, since " in refused
        assert f"`scancel {last}`" in refused
        assert project.cluster.jobs() == [last]
    wait_until(lambda: last not in project.cluster.jobs(), "the end of the job without Snakemake")
    return seen, saved


@pytest.mark.soak
@pytest.mark.parametrize(
    "events",
    [
        pytest.param((preempt, orphan), id="two"),
        pytest.param((warn, exceed, preempt, orphan), id="four"),
    ],
)
def test_kills_change_no_bit(project: Project, events: tuple[Any, ...]) -> None:
    """Warned of its time limit, killed at its time limit without another word, preempted, its
    Snakemake killed while it trains on: an undisturbed training's weights, bit by bit. Each start
    continues from the newest checkpoint of the one before: at most what followed it is trained
    twice. A Snakemake that finds the training under way refuses to start a second one."""
    for run in ("disturbed", "undisturbed"):
        project.configure(run, CONFIG.format(run=run))
    project.snakemake("--cores", "2", *arguments("undisturbed"))
    project.snakemake("--cores", "2", *INPUTS)
    snakemake = project.start(*arguments("disturbed", *SUBMIT))
    seen = saved = 0
    for happen in events:
        seen, saved = happen(project, snakemake, seen, saved)
    project.snakemake(*arguments("disturbed", *SUBMIT))
    assert tensors(project, "disturbed") == tensors(project, "undisturbed")
    assert project.steps("disturbed/plain") == [*range(1, 151)]
    assert not list((project.folder / "results/disturbed/plain").glob("progress.stale-*"))


@pytest.mark.soak
def test_of_two_snakemakes_one_trains(project: Project) -> None:
    """Both have planned and submitted before a training begins. The second job names the owner and
    ends, and its Snakemake fails. Where that sees the failure only after the first job's end, it
    takes away what the job was to make, as Snakemake does: the next one publishes it again from
    progress, and no step is trained twice."""
    project.configure("disturbed", CONFIG.format(run="disturbed").replace("150", "40"))
    cluster, path = project.cluster, project.folder / "results/disturbed/plain"
    project.snakemake("--cores", "2", *INPUTS)
    words = arguments("disturbed", *PROFILE, *NO_GPUS, "--nolock", "--retries", "0")
    both = [project.start(*words), project.start(*words)]
    with held(project, 10):
        (refused,) = wait_until(lambda: failed_logs(project), "the refusal of the other job")
        assert "a training is running here already: pid " in refused
        (winner,) = cluster.jobs()
        assert f", job {winner}, since " in refused
    for snakemake in both:
        snakemake.process.send_signal(signal.SIGSTOP)
    wait_until((path / "checkpoint/manifest.json").exists, "the checkpoint")
    wait_until(lambda: not cluster.jobs(), "the end of its job")
    for snakemake in both:
        snakemake.process.send_signal(signal.SIGCONT)
    said = [snakemake.end(None) for snakemake in both]
    assert 1 in [one.process.returncode for one in both], said
    project.snakemake(*arguments("disturbed", *PROFILE, *NO_GPUS))
    assert project.steps("disturbed/plain") == [*range(1, 41)]
    assert (path / "weights/manifest.json").exists()


def state_of(project: Project, job: str) -> str:
    """The state of a job, as Slurm calls it."""
    shown = project.cluster.ask("scontrol", "show", "job", "-o", job)
    return shown.partition(" JobState=")[2].partition(" ")[0]


def failed_logs(project: Project) -> list[str]:
    """What failed jobs have printed; of others Snakemake removes it when it sees their end."""
    logs = (project.folder / ".snakemake/slurm_logs/rule_train_phase/plain").glob("*.log")
    return [path.read_text() for path in logs if state_of(project, path.stem) == "FAILED"]


def newest_checkpoint(project: Project) -> int:
    """The step of the newest checkpoint."""
    progress = project.progress("disturbed/plain")
    return max(int(path.name.removeprefix("step-")) for path in progress.glob("step-*"))


def first_step(project: Project) -> int:
    """The step from which the training that runs has continued. A slow machine may have reached the
    time limit once more before."""
    return int(re.findall(r"^plain: torch on cpu, steps (\d+) to 150,", log(project), re.M)[-1])


def log(project: Project) -> str:
    """The log of the training's rule."""
    return (project.folder / "results/disturbed/logs/train_phase.plain.log").read_text()
