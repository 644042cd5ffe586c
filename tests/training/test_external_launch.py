"""Training processes that torchrun or srun started: the same locks, codes and numbers."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.builders.phases import make_phase
from tests.builders.processes import run_ranks, wait_until

from zerotrain import artifact
from zerotrain.errors import EXIT_UNFINISHED, EXIT_USER_ERROR, PipelineError
from zerotrain.machine.child_process import SUPERVISOR
from zerotrain.machine.ports import free_port
from zerotrain.training import rank
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.checkpointing.saving import Saving
from zerotrain.training.process import external_launch, lock
from zerotrain.training.process.external_launch import train_externally_launched
from zerotrain.training.process.failures import EXIT_FAULT
from zerotrain.training.process.machines import adopt_slurm, init_process_group
from zerotrain.training.process.stop import StopRequest

STEPS = 40
SRUN = {
    "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[03-07,12],big1",
}  # fmt: skip


def test_what_srun_says_is_what_torch_reads() -> None:
    """Each process derives the same meeting place, from the job and the step."""
    found = dict(SRUN)
    adopt_slurm(found)
    added = {key: value for key, value in found.items() if key not in SRUN}
    port = added.pop("MASTER_PORT")
    assert added == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03",
    }  # fmt: skip
    assert 10000 <= int(port) < 30000
    other = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    adopt_slurm(other)
    assert (other["MASTER_ADDR"], other["MASTER_PORT"]) == ("gpu03", port)
    next_step = SRUN | {"SLURM_STEP_ID": "1"}
    adopt_slurm(next_step)
    assert next_step["MASTER_PORT"] != port
    next_phase = dict(SRUN)
    adopt_slurm(next_phase, "results/digits/plain/launch")
    assert next_phase["MASTER_PORT"] != port


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-07]", "gpu03"),
        ("a[1,4]b,c", "a1b"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    """As Slurm writes it."""
    found = SRUN | {"SLURM_STEP_NODELIST": nodes}
    adopt_slurm(found)
    assert found["MASTER_ADDR"] == first


def test_who_says_it_already_is_left_alone() -> None:
    """torchrun under srun, an address of the user's, and a script of sbatch without srun."""
    under = SRUN | {"RANK": "1", "WORLD_SIZE": "2"}
    adopt_slurm(under)
    assert "MASTER_ADDR" not in under
    addressed = SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
    adopt_slurm(addressed)
    assert (addressed["MASTER_ADDR"], addressed["MASTER_PORT"]) == ("10.0.0.1", "5")
    script = {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    before = dict(script)
    adopt_slurm(script)
    assert script == before
    shown = SRUN | {"CUDA_VISIBLE_DEVICES": "1"}
    adopt_slurm(shown)
    assert shown["LOCAL_RANK"] == "0"


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is divided among as many as the phase has."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(PipelineError, match="num_processes is 2, and 3 were started"):
        init_process_group(make_phase().with_values(num_processes=2))


def _process(number: int, environment: dict[str, str], words: list[str], output: Path) -> None:
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ.pop(SUPERVISOR, None)
    os.environ.update(environment, SLURM_PROCID=str(number), SLURM_LOCALID=str(number))
    sys.exit(train_externally_launched(rank.read_arguments(words), rank.train_rank))


def _slow_to_publish(*arguments: Any) -> None:
    publish = Saving._publish

    def later(self: Saving, parts: Any) -> None:
        time.sleep(3)
        publish(self, parts)

    Saving._publish = later  # type: ignore[method-assign]
    _process(*arguments)


def _wait_for_a_signal(number: int, *arguments: Any) -> None:
    """Train until step 3 is logged, and no further before the second process has got a signal."""
    asked = StopRequest.__call__

    def wait(self: StopRequest) -> bool:
        log = self._file.parent / progress_folder.LOG
        deadline = time.monotonic() + 90
        while log.is_file() and log.read_text().count("\n") >= 3 and time.monotonic() < deadline:
            if asked(self):
                return True
            time.sleep(0.02)
        return asked(self)

    if number == 1:
        StopRequest.__call__ = wait  # type: ignore[method-assign]
    _process(number, *arguments)


class Srun:
    """Two processes of a phase, with the environment that srun gives them."""

    def __init__(self, training: Any, server: Any) -> None:
        self.training = training
        self.processes: list[Any] = []
        self._server = server

    def start(self, name: str, count: int = 2, target: Any = _process) -> list[Any]:
        """Start them."""
        environment = {
            "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        started = [
            self._server.Process(
                target=target,
                args=(number, environment, self.training.words(name), self.training.output),
            )
            for number in range(count)
        ]
        for process in started:
            process.start()
        self.processes += started
        return started

    def codes(self, started: list[Any]) -> list[int | None]:
        """Wait for their ends."""
        for process in started:
            process.join(90)
        return [process.exitcode for process in started]


@pytest.fixture
def srun(training: Any, server: Any) -> Iterator[Srun]:
    """Starts processes as srun would."""
    made = Srun(training, server)
    yield made
    for process in made.processes:
        if process.is_alive():
            process.kill()
        process.join(10)


@pytest.mark.slow
def test_resume_under_srun_after_a_signal(training: Any, srun: Srun) -> None:
    """One signal ends both processes with 85; the stage publishes what the next start trained."""
    training.phase("main", "torch", STEPS, num_processes=2)
    progress = training.progress("main")
    running = srun.start("main", target=_wait_for_a_signal)
    training.wait_for_step("main", 3, *running)
    assert srun.codes(srun.start("main")) == [EXIT_USER_ERROR] * 2
    said = training.output.read_text()
    assert said.count("a training is running here already: pid") == 1
    os.kill(running[1].pid, signal.SIGTERM)
    assert srun.codes(running) == [EXIT_UNFINISHED] * 2, training.output.read_text()
    (step,) = progress_folder.saved_steps(progress)
    assert 3 <= step < STEPS
    assert lock.read_owner(progress) is None
    said = training.output.read_text()
    assert f"main: unfinished: stopped on request; a checkpoint was written at step {step}" in said
    assert srun.codes(srun.start("main")) == [0, 0], training.output.read_text()
    assert f"main: trained to step {STEPS}; the rule train_phase publishes it" in (
        training.output.read_text()
    )
    training.run("whole", "torch", STEPS, num_processes=2)
    assert training.hashes("main", STEPS) == training.hashes("whole", STEPS)
    before = (progress / progress_folder.LOG).read_bytes()
    assert training.call_stage("main") == 0
    assert artifact.is_published(training.folder / "main" / "checkpoint")
    assert (progress / progress_folder.LOG).read_bytes() == before


@pytest.mark.slow
def test_no_process_ends_before_the_checkpoint_is_there(training: Any, srun: Srun) -> None:
    """torchrun and srun end all processes once one has ended with a code: the first process has
    published the checkpoint, and given its lock back, before any other ends."""
    training.phase("main", "torch", STEPS, num_processes=2)
    progress = training.progress("main")
    first, second = srun.start("main", target=_slow_to_publish)
    training.wait_for_step("main", 3, first, second)
    os.kill(second.pid, signal.SIGTERM)
    second.join(60)
    assert progress_folder.saved_steps(progress)
    assert lock.read_owner(progress) is None
    assert srun.codes([first, second]) == [EXIT_UNFINISHED] * 2, training.output.read_text()


@pytest.mark.slow
def test_a_lost_process_leaves_no_lock(training: Any, srun: Srun) -> None:
    """The first process ends without unwinding, because others would be waited for again; a start
    on another host must not find its lock."""
    training.phase("main", "torch", 5000, num_processes=2)
    first, second = srun.start("main")
    training.wait_for_step("main", 3, first, second)
    second.kill()
    assert srun.codes([first]) == [EXIT_FAULT], training.output.read_text()
    assert lock.read_owner(training.progress("main")) is None


@pytest.mark.slow
def test_a_start_that_was_taken_over_ends_its_former_holder(training: Any, srun: Srun) -> None:
    """As one that was suspended for longer than its lease, while another host took over."""
    training.phase("main", "torch", 5000)
    (first,) = srun.start("main", 1)
    training.wait_for_step("main", 3, first)
    path = training.progress("main") / lock.LOCK
    other = json.loads(path.read_text()) | {"host": "elsewhere", "pid": 7, "boot": "another"}
    draft = path.with_name("other")
    draft.write_text(json.dumps(other))
    draft.rename(path)
    assert srun.codes([first]) == [EXIT_USER_ERROR], training.output.read_text()
    assert "another training has taken over: pid 7 on elsewhere" in training.output.read_text()
    assert json.loads(path.read_text()) == other


def test_who_has_given_its_lock_back_is_not_ended(
    training: Any, srun: Srun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take a while from there to its end."""
    monkeypatch.setattr(lock, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(external_launch, "_end_without_lock", lambda progress: os._exit(9))
    _started(training, srun)
    for thread in [one for one in threading.enumerate() if one.name == "lock"]:
        thread.join(5)
        assert not thread.is_alive()
    assert lock.read_owner(training.progress("main")) is None


def _started(training: Any, srun: Srun) -> Any:
    phase = training.phase("main", "torch", STEPS)
    with ExitStack() as held:
        return external_launch._prepare(rank.read_arguments(training.words("main")), phase, held)


def _end(folder: Path) -> None:
    from torch import distributed

    distributed.init_process_group("gloo")
    if number := distributed.get_rank():
        broadcast = external_launch.ranks.broadcast

        def receive_late(value: Any) -> Any:
            received = broadcast(value)
            time.sleep(1)
            (folder / f"{number}").touch()
            return received

        external_launch.ranks.broadcast = receive_late
    assert external_launch._wait_for_first_rank(EXIT_UNFINISHED) == EXIT_UNFINISHED
    if number == 0:
        assert {file.name for file in folder.iterdir()} == {"1", "2"}


def test_the_first_process_ends_when_the_others_know(server: Any, tmp_path: Path) -> None:
    """A broadcast may return before it is sent; a process that ends takes the rest of it along."""
    (tmp_path / "known").mkdir()
    run_ranks(server.Process, _end, 3, tmp_path / "known", output=tmp_path / "output.txt")


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "phase main: a folder or file that", 2),
        (PipelineError("p: no checkpoint is whole", hint="copy"), "p: no checkpoint is whole", 2),
        (ValueError("shapes"), "phase main: could not be started: ValueError: shapes", 1),
    ],
)
@pytest.mark.parametrize("place", ["lock.take", "newest_intact", "check_room"])
def test_the_others_hear_of_whatever_stops_the_first(
    training: Any, srun: Srun, monkeypatch: pytest.MonkeyPatch,
    place: str, error: Exception, said: str, code: int,
) -> None:  # fmt: skip
    """Of a lock that cannot be written as of checkpoints of which none is whole: they wait for
    the first process's word; and its lock is given back."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(f"zerotrain.training.process.external_launch.{place}", fail)
    begun = _started(training, srun)
    assert begun.what.startswith(said)
    assert begun.hint
    assert begun.code == code
    assert lock.read_owner(training.progress("main")) is None


def test_a_phase_that_a_validation_has_ended_is_finished(
    training: Any, srun: Srun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for the stage: it is not trained on to its `until`."""
    monkeypatch.setattr(external_launch, "end_step", lambda _, phase: phase.derived.until_step - 7)
    assert _started(training, srun).finished
    external_launch._report_end(
        0, training.phase("other", "torch", STEPS), training.progress("main")
    )
    assert f"other: trained to step {STEPS - 7}; the rule" in capsys.readouterr().err


def test_a_mistake_ends_all_processes_with_its_code(training: Any, srun: Srun) -> None:
    """One sentence, no traceback, and no process waits for the others."""
    training.phase("main", "torch", STEPS, num_processes=2, learning_rate=1e30, lr_warmup_steps=0)
    victim = training.folder / "main/launch/accelerate.yaml"
    victim.write_text(victim.read_text() + "# changed\n")
    assert srun.codes(srun.start("main")) == [EXIT_USER_ERROR] * 2
    said = training.output.read_text()
    assert said.count("ERROR: ") == said.count("Hint: ") == 1
    assert str(victim) in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", pytest.param("zero2", marks=pytest.mark.soak)])
def test_resume_under_torchrun(training: Any, srun: Srun, preset: str) -> None:
    """The documented command, for real."""
    training.phase("main", preset, STEPS, num_processes=2)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
        *("--master-port", str(free_port()), "-m", "zerotrain.training.rank"),
        *training.words("main"),
    ]
    with training.output.open("ab") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            training.wait_for_step("main", 3)
            running.send_signal(signal.SIGTERM)
            assert running.wait(90) != 0
        finally:
            running.kill()
        wait_until(lambda: not lock.read_owner(training.progress("main")), "the lock's release")
        (step,) = progress_folder.saved_steps(training.progress("main"))
        assert 3 <= step < STEPS
        assert subprocess.run(command, stdout=output, stderr=output, check=False).returncode == 0
    training.run("whole", preset, STEPS, num_processes=2)
    assert training.hashes("main", STEPS) == training.hashes("whole", STEPS)
