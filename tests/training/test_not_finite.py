"""A sample whose loss is no finite number: named, and its update left out by every engine."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builders.phases import SAMPLES, SEED
from tests.training.conftest import Training, write_cache

from zerotrain.data.draws import SampleOrder
from zerotrain.training.checkpointing import progress_folder

SPOILT, BATCH = 3, 4
ORDER = SampleOrder(SEED, [np.arange(SAMPLES)], BATCH)
STEP = next(p for p in range(SAMPLES) if ORDER.place(p)[1] == SPOILT) // BATCH + 1
"""The step of the first epoch that has the spoilt sample."""
UNTIL = STEP + 2
SKIP = {"nan_action": "skip", "save_every": 1, "keep": UNTIL}


@pytest.fixture(scope="module")
def spoilt_inputs(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Path:
    """The shared inputs with one sample of NaN."""
    folder = tmp_path_factory.mktemp("spoilt")
    shutil.copytree(inputs / "base", folder / "base")
    write_cache(folder / "cache", [SPOILT])
    return folder


@pytest.fixture
def spoilt(tmp_path: Path, spoilt_inputs: Path, server: Any) -> Training:
    return Training(tmp_path, spoilt_inputs, server)


def held(training: Training, step: int) -> dict[str, Any]:
    """All that a checkpoint of phase a holds, tensor by tensor."""
    found = training.checkpoint("a", step)
    tensors = {
        (n, s): found.tensor(n, s).numpy().tobytes() for n in found.names for s in found.slots
    }
    return {**tensors, "updates": found.position.optimizer_step}


def test_the_step_is_in_the_middle():
    """Moments are there before it, and an update comes after it within the epoch."""
    assert 1 < STEP < SAMPLES // BATCH


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("torch", {}),
        ("zero2", {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}),
        ("zero3_offload", {}),
        ("torch", {"gradient_accumulation_steps": 2, "num_processes": 2}),
        ("zero1", {"mixed_precision": "bf16"}),
        ("zero2_offload", {"gradient_accumulation_steps": 2}),
        ("zero3", {"mixed_precision": "bf16", "max_grad_norm": 0.0}),
    ],
)  # fmt: skip
def test_skip_leaves_exactly_that_update_out(spoilt, preset, changes):
    """The step counts: the log says so, and the person who watches reads the sample's file."""
    losses = spoilt.run("a", preset, UNTIL, **SKIP, **changes)
    assert held(spoilt, STEP) == held(spoilt, STEP - 1)
    after = held(spoilt, UNTIL)
    assert after["updates"] == UNTIL - 1
    assert losses[STEP - 1] is None
    assert all(loss > 0 for number, loss in enumerate(losses, 1) if number != STEP)
    assert [line.get("skipped", 0) for line in spoilt.log("a")] == [
        int(number == STEP) for number in range(1, UNTIL + 1)
    ]
    said = spoilt.output.read_text()
    found = re.search(
        rf"the loss of step {STEP} is nan; the loss is not finite for (.+); this", said
    )
    assert found
    names = found[1].split(", ")
    # A processor's matrix tiles in bf16 let a nan spread to the samples of its batch.
    assert f"{SPOILT}.png" in names if "mixed_precision" in changes else names == [f"{SPOILT}.png"]


@pytest.mark.parametrize("preset", ["torch", pytest.param("zero2", marks=pytest.mark.slow)])
def test_fp16_bears_it_as_an_overflow(spoilt, preset):
    """The update is left out and the loss scale halved, as for any gradient that overflows."""
    fp16 = {"loss_scale": 0.0, "initial_scale_power": 4, "loss_scale_window": 1000,
            "hysteresis": 1, "min_loss_scale": 1}  # fmt: skip
    spoilt.run("a", preset, UNTIL, **SKIP, mixed_precision="fp16", fp16=fp16)
    assert held(spoilt, STEP) == held(spoilt, STEP - 1)
    found = spoilt.checkpoint("a", UNTIL).position
    assert (found.optimizer_step, found.loss_scale["scale"]) == (UNTIL - 1, 8.0)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero2_offload"])
def test_resume_after_a_skip_is_exact(spoilt, preset):
    """Killed after the step that was left out, at a checkpoint of before it and of after it."""
    spoilt.run("whole", preset, UNTIL, nan_action="skip")
    for every in (STEP - 1, STEP):
        name = f"every-{every}"
        spoilt.phase(name, preset, UNTIL, nan_action="skip", save_every=every)
        process = spoilt.start(name)
        spoilt.wait_for_step(name, STEP)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        spoilt.train(name)
        assert spoilt.hashes(name, UNTIL) == spoilt.hashes("whole", UNTIL)


def test_stop_names_the_sample(spoilt):
    """The default: one sentence with the file, and nothing is saved after it."""
    spoilt.phase("a", "torch", UNTIL, save_every=1)
    process = spoilt.start("a")
    process.join(60)
    said = spoilt.output.read_text()
    assert f"the loss of step {STEP} is nan; the loss is not finite for {SPOILT}.png" in said
    assert "look at these samples" in said
    assert "Traceback" not in said
    assert progress_folder.saved_steps(spoilt.progress("a"))[-1] == STEP - 1
