"""train_phase as users meet it: the real command, the real launcher, and what ends either."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from tests.builders.refusals import refusal

from zerotrain import artifact
from zerotrain.errors import EXIT_UNFINISHED, EXIT_USER_ERROR
from zerotrain.machine.child_process import SAME_SECONDS
from zerotrain.stages.train_phase import allocator
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.process import lock
from zerotrain.training.reporting import heartbeat

KILLED = 128 + signal.SIGKILL
PRESETS = ["torch", pytest.param("zero2_offload", marks=pytest.mark.soak)]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_resume_after_a_signal_to_the_command(training, phase, preset):
    """Code 85 and a checkpoint; meanwhile a second start is refused and disturbs nothing."""
    until = 60
    command = phase("stopped", preset, until)
    running = command.start()
    command.wait_for_step(5)
    # Held in a step, else a quick machine would have ended the training before the second start.
    ranks = [psutil.Process(one.process.pid) for one in heartbeat.read_statuses(command.progress)]
    assert ranks
    for one in ranks:
        one.suspend()

    code, said = command.run()
    assert code == EXIT_USER_ERROR
    owner = lock.read_owner(command.progress)
    assert f"a training is running here already: pid {owner.pid} on {socket.gethostname()}" in said
    assert owner.pid in {process.pid for process in command.processes()}
    assert said.count("ERROR: ") == said.count("Hint: ") == 1
    assert "Traceback" not in said
    assert running.poll() is None

    running.send_signal(signal.SIGTERM)
    command.wait_for((command.progress / progress_folder.STOP).exists, "a request to stop")
    for one in ranks:
        one.resume()
    code, said = command.end(running)
    assert code == EXIT_UNFINISHED, said
    command.wait_for_silence()
    (step,) = progress_folder.saved_steps(command.progress)
    assert 5 <= step < until
    assert f"unfinished: stopped on request; a checkpoint was written at step {step}" in said
    assert not command.checkpoint.exists()
    assert lock.read_owner(command.progress) is None

    training.prepare("stopped")  # the command itself resumes after its kill, below
    training.train("stopped")
    assert [line["step"] for line in training.log("stopped")] == list(range(1, until + 1))
    training.run("whole", preset, until)
    assert training.hashes("stopped", until) == training.hashes("whole", until)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_resume_after_kill_of_the_command(training, phase, preset):
    """kill -9 of the command, which can do nothing then, ends its training within seconds; the next
    start takes over the dead owner's lock, and ends in the weights of an undisturbed run."""
    until = 120
    command = phase("killed", preset, until, save_every=20)
    running = command.start()
    command.wait_for_save()
    assert len(command.processes()) >= 3
    running.kill()
    running.wait()
    command.wait_for_silence()
    assert lock.read_owner(command.progress) is not None
    assert progress_folder.saved_steps(command.progress)

    code, said = command.run()
    assert code == 0, said
    assert [line["step"] for line in training.log("killed")] == list(range(1, until + 1))
    training.run("whole", preset, until)
    assert command.hashes() == training.hashes("whole", until)


@pytest.mark.slow
def test_a_training_whose_lock_is_anothers_ends(phase):
    """A cluster may give up a machine that runs on, and start the job on another machine: there is
    one training soon, and it is the later one's lock that stays."""
    command = phase("lost", save_every=3, until=10**5)
    running = command.start()
    command.wait_for_save()
    path = command.progress / lock.LOCK
    later = json.dumps({**json.loads(path.read_text()), "host": "elsewhere", "job": "71"})
    path.write_text(later)
    code, said = command.end(running)
    assert code == EXIT_USER_ERROR
    owner = json.loads(later)["pid"]
    assert f"another training has taken over: pid {owner} on elsewhere, job 71, since" in said
    assert said.count("ERROR: ") == said.count("Hint: ") == 1
    command.wait_for_silence()
    assert path.read_text() == later
    assert not command.checkpoint.exists()


@pytest.mark.slow
@pytest.mark.parametrize("preset", [pytest.param("torch", marks=pytest.mark.soak), "zero2"])
def test_resume_after_one_process_of_two_was_killed(training, phase, preset):
    """The others do not wait for it until their time-out: the command ends, names the rank and its
    signal in one sentence, with a cause and what to do and without the launcher's traceback;
    nothing is published, and the lock is given back. What is trained next continues to the same
    weights, of which each rank writes its own file."""
    until = 40
    command = phase(f"{preset}-widow", preset, until, num_processes=2, save_every=3)
    running = command.start()
    command.wait_for_step(5)
    victim = next(one for one in heartbeat.read_statuses(command.progress) if one.rank == 1)
    os.kill(victim.process.pid, signal.SIGKILL)
    code, said = command.end(running)
    assert code == 1, said
    step = progress_folder.saved_steps(command.progress)[-1]
    assert (
        f"ERROR: phase {preset}-widow: rank 1 was killed by SIGKILL; newest checkpoint: step "
        f"{step}\n"
    ) in said
    assert "or the system for memory, which `dmesg` then says" in said
    assert said.count("ERROR: ") == said.count("Hint: ") == 1, said
    assert "Traceback" not in said, said
    assert "FutureWarning" not in said
    command.wait_for_silence()
    assert not command.checkpoint.exists()
    assert lock.read_owner(command.progress) is None
    training.prepare(command.name)
    training.train(command.name)
    hashes = training.hashes(command.name, until)
    assert {name[:10] for name in hashes} == {"rank-00000", "rank-00001"}
    training.run("alone", preset, until, num_processes=2)
    assert hashes == training.hashes("alone", until)


PARTS = ("launcher", "rank 1", "launcher and ranks")
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SENT = (signal.SIGUSR1, "launcher and ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whom"),
    [
        # As clusters send it: each process stops for each of them (test_stop_request.py, and
        # test_external_launch.py for one rank of two). The others are for `make test-soak`.
        pytest.param(number, whom, marks=() if (number, whom) == SENT else pytest.mark.soak)
        for number in STOPPING
        for whom in PARTS
    ],
)
def test_resume_after_a_signal_to_a_part(phase, whom, number):
    """Whoever of the processes gets it, and however many of them."""
    command = phase("parts", num_processes=2)
    running = command.start()
    command.wait_for_step(3)
    ranks = {one.rank: one.process.pid for one in heartbeat.read_statuses(command.progress)}
    launcher = psutil.Process(ranks[0]).ppid()
    for pid in {"launcher": [launcher], "rank 1": [ranks[1]],
                "launcher and ranks": [launcher, *ranks.values()]}[whom]:  # fmt: skip
        os.kill(pid, number)
    code, said = command.end(running)
    assert code == EXIT_UNFINISHED, said
    assert "unfinished: stopped on request; a checkpoint was written at step" in said
    assert "Traceback" not in said
    command.wait_for_silence()
    assert len(progress_folder.saved_steps(command.progress)) == 1


@pytest.mark.soak
def test_resume_after_two_signals(phase):
    """The second signal ends everything at once, whatever it was doing, and gives the lock back."""
    command = phase("hurried")
    running = command.start()
    command.wait_for(lambda: len(command.processes()) > 2, "the launcher")
    running.send_signal(signal.SIGINT)
    command.wait_for((command.progress / progress_folder.STOP).exists, "a request to stop")
    # Between the signals nothing moves, else a quick machine would have followed the first.
    below = psutil.Process(running.pid).children(recursive=True)
    for process in below:
        process.suspend()
    time.sleep(SAME_SECONDS + 0.1)
    running.send_signal(signal.SIGINT)
    code, said = command.end(running)
    assert code == KILLED
    assert "a second signal ends it at once" in said
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    command.wait_for_silence()
    assert not progress_folder.saved_steps(command.progress)


@pytest.mark.slow
def test_resume_with_until_at_a_saved_step_publishes_without_training(training):
    """What is trained already is published at once, as a second name of the same files; progress
    keeps its own."""
    training.run("raised", "torch", 12, save_every=4, keep=3)
    log = training.progress("raised") / progress_folder.LOG
    trained, output = log.read_bytes(), training.folder / "raised" / "checkpoint"
    for until in (8, 12):
        training.phase("raised", "torch", until, save_every=4, keep=3)
        assert training.call_stage("raised") == 0
        for name in training.hashes("raised", until):
            assert (output / name).samefile(training.rolling("raised", until) / name)
    assert log.read_bytes() == trained
    assert progress_folder.saved_steps(log.parent) == [4, 8, 12]


@pytest.mark.slow
def test_resume_after_a_mistake_that_only_training_finds(phase):
    """A mistake that shows in training (here a loss that is no number) ends the command as any
    mistake does: both processes find it, and there is one ERROR, one hint, exit code 2, and no
    traceback of the launcher's."""
    command = phase("diverging", learning_rate=1e30, lr_warmup_steps=0, max_grad_norm=0.0,
                    num_processes=2)  # fmt: skip
    code, said = command.run()
    assert code == EXIT_USER_ERROR, said
    assert "ERROR: phase diverging: the loss of step" in said
    assert said.count("ERROR: ") == said.count("Hint: ") == 1
    assert "Traceback" not in said
    assert "lower learning_rate" in said
    assert json.loads((command.progress / progress_folder.EXIT).read_text())["code"] == code
    command.wait_for_silence()


@pytest.mark.slow
def test_resume_under_another_launch_is_refused(training):
    """The progress stays where it is, nothing is started, and the sentence names the switch."""
    training.run("moved", "torch", 8)
    training.phase("moved", "zero3", until=12)
    said = refusal(training.call_stage, "moved")
    assert "engine torch, now deepspeed; ZeRO stage 0, now 3" in said
    assert "`zerotrain switch tiny --to zero3` ends the phase at step 8" in said
    assert progress_folder.saved_steps(training.progress("moved")) == [8]


@pytest.mark.parametrize(("size", "given_back"), [(2**27, True), (2**20, False)])
def test_large_models_alone_give_memory_back_at_once(tmp_path, size, given_back):
    """The text encoders, which training does not load, do not count."""
    with artifact.publish(tmp_path / "base", "base") as draft:
        for part, length in (("unet", size), ("text_encoder", 2**28)):
            (draft.folder / part).mkdir()
            with (draft.folder / part / "model.safetensors").open("wb") as file:
                file.truncate(length)
            draft.known[f"{part}/model.safetensors"] = "0" * 64  # what is large takes long to hash
        draft.content = {"parts": {}}
    assert bool(allocator(artifact.read(tmp_path / "base", "base", verify=False))) == given_back


WITHOUT_LAUNCH = """
import sys
from pathlib import Path
from zerotrain.stages import train_phase as stage

stage.supervise = lambda *_, **__: 0
stage._publish = lambda *_: None
launch, base, cache, progress, output = map(Path, sys.argv[1:])
assert stage.train_phase(launch, base, cache, None, progress, output) == 0
sys.exit("torch" in sys.modules)
"""


def test_the_stage_holds_no_torch(training):
    """Its process lives as long as the training, whose memory torch would take."""
    training.phase("light", "torch", 4)
    folder = training.folder / "light"
    words = (folder / "launch", training.base, training.cache, folder / "progress", folder / "end")
    subprocess.run([sys.executable, "-c", WITHOUT_LAUNCH, *words], check=True)
