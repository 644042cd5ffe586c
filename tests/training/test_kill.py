"""kill -9 while a checkpoint is saved, exported or taken over: nothing half-written is ever taken
for whole, and nothing is lost. Thirty kills in all, at moments that a seed draws."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.training.matrix import export as export_state
from tests.training.test_resume import wait_for_step

from zerotrain import artifact
from zerotrain.checkpoint import Checkpoint
from zerotrain.families import load_family
from zerotrain.training import progress_folder

KILLS = 10
STEPS = 80


def _export(checkpoint: Path, base: Path, weights: Path, state: Path) -> None:
    """In a process of its own: the whole export."""
    from zerotrain.export import WeightsTarget, export

    os.environ["OMP_NUM_THREADS"] = "1"
    target = WeightsTarget(weights, base, load_family("sdxl"), "fp32")
    export(Checkpoint(checkpoint), checkpoint, target, state)


def kill_after(process: ForkServerProcess, seconds: float) -> None:
    """kill -9 the process when so much time has passed, unless it has ended."""
    process.join(seconds)
    process.kill()
    process.join()


def test_kill_while_saving_loses_no_checkpoint(training):
    """A checkpoint at every step: each one found after a kill is whole, none goes back, and the
    end has the bits of a run that was left alone."""
    shape = {"save_every": 1, "keep": 3}
    training.run("whole", "torch", STEPS, **shape)
    training.phase("cut", "torch", STEPS, **shape)
    moments, reached = random.Random(1), 0
    for _ in range(KILLS):
        process = training.start("cut")
        wait_for_step(training, "cut", reached + 2)
        kill_after(process, moments.uniform(0, 0.1))
        saved = progress_folder.saved_steps(training.progress("cut"))
        for step in saved:
            folder = progress_folder.step_folder(training.progress("cut"), step)
            assert Checkpoint(folder).position.step == step
        assert reached < max(saved) < STEPS
        reached = max(saved)
    training.train("cut")
    assert training.hashes("cut", STEPS) == training.hashes("whole", STEPS)
    assert [line["step"] for line in training.log("cut")] == list(range(1, STEPS + 1))


def test_kill_while_exporting_leaves_the_old_or_the_new(training, server):
    """Weights and state of an earlier step stay until those of a later one are whole."""
    training.run("run", "zero2", 4, save_every=2, keep=2)
    earlier, later = (progress_folder.step_folder(training.progress("run"), s) for s in (2, 4))
    weights, state = training.folder / "weights", training.folder / "state"

    def start(checkpoint: Path) -> ForkServerProcess:
        process = server.Process(target=_export, args=(checkpoint, training.base, weights, state))
        process.start()
        return process

    def identities() -> tuple[str, str]:
        return artifact.read(weights, "weights").identity, artifact.read(state, "state").identity

    begun = time.monotonic()
    process = start(earlier)
    process.join(60)
    duration = time.monotonic() - begun
    assert process.exitcode == 0
    before = identities()
    moments, seen = random.Random(2), set()
    for _ in range(KILLS):
        kill_after(start(later), moments.uniform(0.2, 1.0) * duration)
        seen.add(identities())
    process = start(later)
    process.join(60)
    after = identities()
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert {one for one, _ in seen} <= {before[0], after[0]}
    assert {one for _, one in seen} <= {before[1], after[1]}
    assert sorted(path.name for path in training.folder.glob(".*")) == []


def test_kill_while_importing_leaves_the_state_and_no_progress(training):
    """A phase killed while it takes a state over starts again from it, to the same bits."""
    training.run("first", "torch", 3)
    rolling = progress_folder.step_folder(training.progress("first"), 3)
    state = export_state(rolling, training.folder / "state")
    before = artifact.read(state, "state").identity
    begun = time.monotonic()
    training.run("whole", "zero2", 5, state=state)
    duration = time.monotonic() - begun
    training.phase("second", "zero2", 5)
    moments = random.Random(3)
    for _ in range(KILLS):
        kill_after(training.start("second", state=state), moments.uniform(0, 0.8) * duration)
        assert artifact.read(state, "state").identity == before
        for step in progress_folder.saved_steps(training.progress("second")):
            assert Checkpoint(progress_folder.step_folder(training.progress("second"), step))
    training.train("second", state=state)
    assert training.hashes("second", 5) == training.hashes("whole", 5)
