"""A training that is watched."""

from __future__ import annotations

import pytest
from tests.builders.terminals import Terminal

PRESET, UNTIL = "torch", 60


@pytest.mark.slow
def test_a_watched_training_ends_in_the_same_bits(training, phase, tmp_path, monkeypatch):
    """`zerotrain watch` follows a real one; Ctrl-C ends the view and nothing else."""
    command = phase("watched", PRESET, UNTIL)
    (tmp_path / "project/results").mkdir(parents=True)
    (tmp_path / "project/results/tiny").symlink_to(training.folder)
    monkeypatch.chdir(tmp_path / "project")
    running = command.start()
    command.wait_for_step(5)
    terminal = Terminal("watch", "--interval", "0.1")
    terminal.wait_for(lambda text: f"of {UNTIL}" in text)
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert "train ▶" in terminal.output
    code, said = command.end(running)
    assert code == 0, said
    training.run("whole", PRESET, UNTIL)
    assert command.hashes() == training.hashes("whole", UNTIL)
