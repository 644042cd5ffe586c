"""Kills by SIGKILL and SIGTERM, at steps that a seed draws, under every preset: a training that is
killed three times ends in the files of one that was left alone."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
from tests.training.matrix import PRESETS, Setup

from zerotrain.training.checkpointing import progress_folder

STEPS, SAVE_EVERY = 30, 3
KILLS = 3
"""Of each training."""
SETUPS = [
    *(Setup(preset) for preset in PRESETS),
    Setup("torch", precision="fp16"),
    Setup("zero2", precision="bf16"),
    Setup("torch", 2),
    Setup("zero3", 2, "bf16"),
]
SAMPLE = Setup("torch", precision="fp16")
"""Stands for all in `make test-full`; `make test-soak` has the others."""


def changes(setup: Setup) -> dict[str, Any]:
    """Values of the phase: each step accumulates twice."""
    return {
        "num_processes": setup.processes,
        "mixed_precision": setup.precision,
        "gradient_accumulation_steps": 2,
        "global_batch_size": 4 * setup.processes,
        "lr_scheduler_steps": STEPS,
        "use_ema": setup.precision == "no",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [pytest.param(s, marks=() if s == SAMPLE else pytest.mark.soak) for s in SETUPS],
    ids=str,
)
def test_killed_three_times_ends_in_the_same_files(training, setup):
    """kill -9 of all processes, or SIGTERM to one of them, which lets all save and end."""
    training.phase("whole", setup.preset, STEPS, **changes(setup))
    whole = training.train("whole")
    training.phase("killed", setup.preset, STEPS, save_every=SAVE_EVERY, **changes(setup))
    draw = random.Random(str(setup))
    for place in sorted(draw.sample(range(4, STEPS - 4), KILLS)):
        how = draw.choice([signal.SIGKILL, signal.SIGTERM])
        # The lines of the start before, which may have come further, are no sign of this one.
        (training.progress("killed") / progress_folder.LOG).unlink(missing_ok=True)
        ranks = training.start_ranks("killed", setup.processes)
        training.wait_for_step("killed", place)
        for process in ranks if how == signal.SIGKILL else [draw.choice(ranks)]:
            os.kill(process.pid, how)
        for process in ranks:
            process.join(90)
        ended = {process.exitcode for process in ranks}
        assert ended == ({-signal.SIGKILL} if how == signal.SIGKILL else {0})
        saved = progress_folder.saved_steps(training.progress("killed"))[-1]
        # The newest one may have been under way, and is lost; the one before it is whole.
        assert place - 2 * SAVE_EVERY <= saved < STEPS
    assert training.train("killed") == whole
    assert training.hashes("killed", STEPS) == training.hashes("whole", STEPS)
