"""Resuming: a training that was killed or stopped ends in the bits of one that was not."""

from __future__ import annotations

import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.training.conftest import Training
from tests.training.resume_bytes import count

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
@pytest.mark.parametrize(
    "how",
    [
        "stop file",
        "SIGTERM",
        *(pytest.param(s, marks=pytest.mark.soak) for s in ("SIGUSR1", "SIGINT")),
    ],
)
def test_resume_after_a_request_to_stop(training, undisturbed, how):
    """It leaves a checkpoint and code 85; the next start ends in the undisturbed bits."""
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
def test_resume_with_a_later_end_trains_the_new_steps_only(training, preset):
    """Every step is trained once, and the end is that of a run that was meant to be so long."""
    whole = training.run("whole", preset, 12)
    training.run("raised", preset, 8)
    kept = [line["seconds"] for line in training.log("raised")]
    assert training.run("raised", preset, 12) == whole
    assert [line["seconds"] for line in training.log("raised")][:8] == kept
    assert training.hashes("raised", 12) == training.hashes("whole", 12)


@pytest.mark.slow
def test_resume_in_bf16_keeps_the_master_weights(training, preset):
    """They are saved and taken over in fp32, not as their rounding."""
    training.assert_resumes(preset, 5, 10, mixed_precision="bf16")


@pytest.mark.parametrize("preset", PRESETS)
def test_resume_in_bf16_starts_from_the_exact_weights(training, preset):
    """A first phase in bf16 trains fp32 master weights that are the base's own, not their rounding:
    after a step that moves nothing they are what the base holds."""
    training.run("a", preset, 1, mixed_precision="bf16", learning_rate=1e-12, lr_warmup_steps=0)
    found = training.checkpoint("a", 1)
    base = load_file(training.base / "unet/diffusion_pytorch_model.safetensors")
    rounding = max(float((t - t.bfloat16().float()).abs().max()) for t in base.values())
    apart = max(float((found.tensor(n, "master") - t).abs().max()) for n, t in base.items())
    assert apart < 1e-9 < rounding


@pytest.mark.slow
def test_resume_keeps_the_schedule_that_training_began_with(training):
    """A horizon that follows from `until` stays, and it is reported; the user's own value wins."""
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
@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3"])
def test_each_of_four_processes_reads_its_own_share(
    server: Any, tmp_path: Path, preset: str
) -> None:
    """At most a fifth more than its masters, moments and average, which it takes over to the bit.

    Under plain PyTorch every process steps all parameters, so that all of them are its share.
    """
    found = count(server.Process, preset, 4, 256, 12, tmp_path)
    assert all(one["read"] <= 1.2 * one["share"] for one in found), found
