"""kill -9 while a checkpoint is saved, exported or taken over: nothing half-written is ever taken
for whole, and nothing is lost. Each kill is at a change of the disk that a seed draws."""

from __future__ import annotations

import os
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from tests.training.kill_point import KillPoint, spread

from zerotrain import artifact
from zerotrain.models.families import load_family
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.training.checkpointing import progress_folder

STEPS_A_KILL = 3
"""A training is killed within as many changes as so many steps make."""


def _export(checkpoint: Path, base: Path, weights: Path, state: Path, kill: KillPoint) -> None:
    """In a process of its own: the whole export."""
    from zerotrain.export.export import export
    from zerotrain.export.target import WeightsTarget

    os.environ["OMP_NUM_THREADS"] = "1"
    kill.arm()
    target = WeightsTarget(weights, base, load_family("sdxl"), "fp32")
    export(Checkpoint(checkpoint), checkpoint, target, state)


def ended(process: ForkServerProcess) -> int | None:
    """How a process has ended: its exit code, or the negative signal that killed it."""
    process.join(120)
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.soak)])
def test_kill_while_saving_loses_no_checkpoint(training, server, kills):
    """Each one found after a kill is whole, none goes back, and the end has the same bits."""
    steps = kills * STEPS_A_KILL + 5
    shape = {"save_every": 1, "keep": 3, "lr_scheduler_steps": steps}
    training.phase("whole", "torch", steps, **shape)
    counter = KillPoint(server, training.folder)
    assert ended(training.start("whole", kill=counter)) == 0
    training.phase("cut", "torch", steps, **shape)
    reached = 0
    for change in spread(STEPS_A_KILL * counter.started // steps, kills, seed=1):
        kill = KillPoint(server, training.folder, change)
        assert ended(training.start("cut", kill=kill)) == -signal.SIGKILL
        saved = progress_folder.saved_steps(training.progress("cut"))
        for step in saved:
            folder = training.rolling("cut", step)
            assert Checkpoint(folder).position.step == step
        assert reached <= max(saved, default=0)
        reached = max(saved, default=0)
    assert 0 < reached < steps
    training.train("cut")
    assert training.hashes("cut", steps) == training.hashes("whole", steps)
    assert [line["step"] for line in training.log("cut")] == list(range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(14, marks=pytest.mark.soak)])
def test_kill_while_exporting_leaves_the_old_or_the_new(training, server, kills):
    """Each of weights and state is what it was or the new one, whole; and weights are never there
    before their state. The next export clears away what is left over."""
    training.run("run", "zero2", 4, save_every=2, keep=2)
    earlier, later = (training.rolling("run", s) for s in (2, 4))
    weights, state = training.folder / "weights", training.folder / "state"

    def export(checkpoint: Path, kill: KillPoint) -> int | None:
        process = server.Process(
            target=_export, args=(checkpoint, training.base, weights, state, kill)
        )
        process.start()
        return ended(process)

    def identities() -> tuple[str, str]:
        return artifact.read(weights, "weights").identity, artifact.read(state, "state").identity

    assert export(earlier, KillPoint(server, training.folder)) == 0
    old = identities()
    counter = KillPoint(server, training.folder)
    assert export(later, counter) == 0
    new = identities()
    assert old[0] != new[0]
    assert old[1] != new[1]
    for change in spread(counter.started, kills, seed=2):
        before = identities()
        checkpoint, goal = (earlier, old) if before[0] == new[0] else (later, new)
        assert export(checkpoint, KillPoint(server, training.folder, change)) == -signal.SIGKILL
        assert identities() in (before, (before[0], goal[1]), goal)
    assert export(later, KillPoint(server, training.folder)) == 0
    assert identities() == new
    assert sorted(path.name for path in training.folder.glob(".*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(6, marks=pytest.mark.soak)])
def test_kill_while_importing_leaves_the_state_and_no_progress(training, server, kills):
    """A phase killed before it has saved anything starts again from the state, to the same bits."""
    training.run("first", "torch", 3)
    state = training.export_state("first", 3)
    before = artifact.read(state, "state").identity
    training.phase("whole", "zero2", 5)
    counter = KillPoint(server, training.folder)
    assert ended(training.start("whole", state=state, kill=counter)) == 0
    training.phase("second", "zero2", 5)
    for change in spread(counter.started, kills, seed=3):
        kill = KillPoint(server, training.folder, change)
        assert ended(training.start("second", state=state, kill=kill)) == -signal.SIGKILL
        assert artifact.read(state, "state").identity == before
        assert progress_folder.saved_steps(training.progress("second")) == []
    training.train("second", state=state)
    assert training.hashes("second", 5) == training.hashes("whole", 5)
