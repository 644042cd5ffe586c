"""Resuming: a training that was killed or stopped ends in the bits of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.training.conftest import Training
from tests.training.resume_bytes import count

from zerotrain import artifact
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.training.checkpointing import progress_folder

STEPS = 30
PRESETS = ("torch", "zero2_offload")


@pytest.fixture(params=PRESETS)
def preset(request) -> str:
    """Every launch preset."""
    return request.param


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, inputs, server):
    """Gives losses and hashes of a run of STEPS under a preset that was left alone."""
    alone = Training(tmp_path_factory.mktemp("undisturbed"), inputs, server)

    @cache
    def run(preset):
        return alone.run(preset, preset, STEPS), alone.hashes(preset, STEPS)

    return run


@pytest.mark.slow
def test_resume_same_seed_gives_the_same_bits(training, preset):
    """Two runs from one seed end in identical tensors and losses."""
    first = training.run("a", preset, 8)
    second = training.run("b", preset, 8)
    assert first == second
    assert training.hashes("a", 8) == training.hashes("b", 8)


@pytest.mark.soak
def test_resume_after_kill_ends_in_the_same_weights(training, undisturbed, preset):
    """kill -9 at random steps, then a start: it continues from the newest complete checkpoint, and
    the last checkpoint equals that of a run that was never killed."""
    training.phase("killed", preset, STEPS, save_every=3)
    places = random.Random(preset).sample(range(4, STEPS - 3), 2)
    for place in sorted(places):
        process = training.start("killed")
        training.wait_for_step("killed", place)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        saved = progress_folder.saved_steps(training.progress("killed"))
        # The one of the step before may be on its way to the disk; that before it is whole.
        assert max(saved, default=0) >= place - place % 3 - 3
    losses = training.train("killed")
    assert (losses, training.hashes("killed", STEPS)) == undisturbed(preset)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "stop file",
        "SIGTERM",
        *(pytest.param(s, marks=pytest.mark.soak) for s in ("SIGUSR1", "SIGINT")),
    ],
)
def test_resume_after_a_request_to_stop(training, undisturbed, how):
    """A request to stop writes a checkpoint after the step at hand and leaves code 85 behind; the
    next start ends in the bits of an undisturbed run."""
    training.phase("stopped", "torch", STEPS)
    process = training.start("stopped")
    training.wait_for_step("stopped", 5)
    if how == "stop file":
        (training.progress("stopped") / progress_folder.STOP).touch()
    else:
        os.kill(process.pid, getattr(signal, how))
    process.join(60)
    assert process.exitcode == 0
    left = json.loads((training.progress("stopped") / progress_folder.EXIT).read_text())
    assert left["code"] == 85
    stopped_at = progress_folder.saved_steps(training.progress("stopped"))
    assert len(stopped_at) == 1
    assert 5 <= stopped_at[0] < STEPS
    assert training.log("stopped")[-1]["step"] == stopped_at[0]
    (training.progress("stopped") / progress_folder.STOP).unlink(missing_ok=True)
    losses = training.train("stopped")
    assert (losses, training.hashes("stopped", STEPS)) == undisturbed("torch")


@pytest.mark.slow
def test_resume_takes_the_checkpoint_before_a_damaged_one(training, capsys):
    """A damaged checkpoint is recognised by its hash and reported; the one before it is taken."""
    whole = training.run("damaged", "torch", 12, save_every=5)
    expected = training.hashes("damaged", 12)
    folder = training.progress("damaged") / "step-00000012"
    victim = folder / "rank-00000-00000.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1] + b"\0")
    assert training.train("damaged") == whole
    assert training.hashes("damaged", 12) == expected
    assert "the checkpoint before it is taken" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_with_a_later_end_trains_the_new_steps_only(training, preset):
    """Raising `until` continues from the last checkpoint; every step is trained once, and the end
    is that of a run that was meant to be so long."""
    whole = training.run("whole", preset, 12)
    training.run("raised", preset, 8)
    kept = [line["seconds"] for line in training.log("raised")]
    assert training.run("raised", preset, 12) == whole
    assert [line["seconds"] for line in training.log("raised")][:8] == kept
    assert training.hashes("raised", 12) == training.hashes("whole", 12)


@pytest.mark.slow
def test_resume_in_bf16_keeps_the_master_weights(training, preset):
    """Under bf16 the fp32 master weights are saved and taken over, not their rounding: a resumed
    run ends in the bits of an undisturbed one."""
    whole = training.run("whole", preset, 10, mixed_precision="bf16")
    training.run("parts", preset, 5, mixed_precision="bf16")
    assert training.run("parts", preset, 10, mixed_precision="bf16") == whole
    assert training.hashes("parts", 10) == training.hashes("whole", 10)


@pytest.mark.slow
def test_resume_counts_time_and_memory_over_all_starts(training):
    """A resumed phase reports the time of all its starts and the highest peak, and the next phase
    counts its own."""
    training.run("a", "torch", 4)
    records = training.progress("a") / "step-00000004/records/resources.json"
    used = json.loads(records.read_text())
    used.update(train_seconds=1000.0, peak_host_bytes=2**50)
    with artifact.publish(training.progress("a") / "step-00000005", "checkpoint") as draft:
        for name in artifact.read(training.progress("a") / "step-00000004", "checkpoint").files:
            target = draft.folder / name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes((training.progress("a") / "step-00000004" / name).read_bytes())
        (draft.folder / "records/resources.json").write_text(json.dumps(used))
    training.run("a", "torch", 8)
    after = json.loads(
        (training.progress("a") / "step-00000008/records/resources.json").read_text()
    )
    assert 1000 < after["train_seconds"] < 1100
    assert after["peak_host_bytes"] == 2**50


@pytest.mark.parametrize("preset", PRESETS)
def test_resume_in_bf16_starts_from_the_exact_weights(training, preset):
    """A first phase in bf16 trains fp32 master weights that are the base's own, not their rounding:
    after a step that moves nothing they are what the base holds."""
    training.run("a", preset, 1, mixed_precision="bf16", learning_rate=1e-12, lr_warmup_steps=0)
    found = Checkpoint(training.progress("a") / "step-00000001")
    base = load_file(training.base / "unet/diffusion_pytorch_model.safetensors")
    rounding = max(float((t - t.bfloat16().float()).abs().max()) for t in base.values())
    apart = max(float((found.tensor(n, "master") - t).abs().max()) for n, t in base.items())
    assert apart < 1e-9 < rounding


@pytest.mark.slow
def test_resume_keeps_the_schedule_that_training_began_with(training):
    """A horizon that follows from `until` stays when `until` is raised, and this is reported; the
    user's own value wins."""
    training.run("a", "torch", 4, lr_scheduler_steps=16)
    derived = {"lr_scheduler_steps": ("derived", "")}
    training.run("a", "torch", 6, lr_scheduler_steps=40, sources=derived)
    assert "keeps its horizon of 16 steps" in training.output.read_text()
    kept = training.log("a")[-1]["learning_rate"]
    training.run("b", "torch", 6, lr_scheduler_steps=16)
    assert kept == training.log("b")[-1]["learning_rate"]
    user = {"lr_scheduler_steps": ("user", "")}
    training.run("a", "torch", 8, lr_scheduler_steps=40, sources=user)
    training.run("c", "torch", 8, lr_scheduler_steps=40)
    assert training.log("a")[-1]["learning_rate"] == training.log("c")[-1]["learning_rate"] > kept


@pytest.mark.slow
def test_resume_accumulation_equals_the_whole_batch(training, preset):
    """Two micro batches of two give the losses of one batch of four."""
    whole = training.run("whole", preset, 6)
    parts = training.run("parts", preset, 6, micro_batch_size=2, gradient_accumulation_steps=2)
    assert parts == pytest.approx(whole, rel=2e-6)


@pytest.mark.slow
def test_resume_rolling_checkpoints_are_pruned(training):
    """`keep` newest checkpoints stay, each complete."""
    training.run("kept", "torch", 11, save_every=2, keep=3)
    progress = training.progress("kept")
    assert progress_folder.saved_steps(progress) == [8, 10, 11]
    for step in (8, 10, 11):
        artifact.read(progress_folder.step_folder(progress, step), "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3"])
def test_each_of_four_processes_reads_its_own_share(
    server: Any, tmp_path: Path, preset: str
) -> None:
    """At most a fifth more than its masters, moments and average, which it takes over to the bit.

    Under plain PyTorch every process steps all parameters, so that all of them are its share.
    """
    found = count(server.Process, preset, 4, 256, 12, tmp_path)
    assert all(one["read"] <= 1.2 * one["share"] for one in found), found
