"""What a run logged: spans of phases, switches and their jumps in loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.evaluation.history import read_history

PLAIN = {"preset": "torch", "engine": "torch", "zero_stage": 0, "world_size": 1}
OFFLOAD = {"preset": "zero2_offload", "engine": "deepspeed", "zero_stage": 2, "world_size": 1}


def lines(phase: str, first: int, losses: list[float | None]) -> list[dict[str, object]]:
    """A line each ten steps."""
    return [
        {"phase": phase, "step": first + 10 * place, "loss": loss}
        for place, loss in enumerate(losses, start=1)
    ]


def publish_state(folder: Path, log: list[dict[str, object]], engine: dict[str, object]) -> Path:
    """A finished phase: its state with the log in its records."""
    with artifact.publish(folder / "state", "state", made_by={"engine": engine}) as draft:
        (draft.folder / "records").mkdir()
        text = "".join(json.dumps(line) + "\n" for line in log)
        (draft.folder / "records" / "metrics.jsonl").write_text(text)
    return folder


def test_the_newest_log_has_all_phases_and_their_switch(tmp_path: Path):
    """A validation of the last step is no line of a step, and the switch names what it changed."""
    before = lines("plain", 0, [1.0, 0.8])
    validation = {"phase": "plain", "step": 20, "val_loss": 0.7}
    log = [*before, validation, *lines("offload", 20, [0.75])]
    plain = publish_state(tmp_path / "plain", log[:3], PLAIN)
    offload = publish_state(tmp_path / "offload", log, OFFLOAD)
    history = read_history([plain, offload])
    assert history.spans == [("plain", 0, 20), ("offload", 20, 30)]
    assert history.validations == [validation]
    assert history.series("val_loss") == [("plain", 20, 0.7)]
    [switch] = history.switches
    assert (switch.step, switch.before, switch.after) == (20, "plain", "offload")
    assert switch.changes == {
        "preset": ("torch", "zero2_offload"),
        "engine": ("torch", "deepspeed"),
        "zero_stage": (0, 2),
    }
    assert read_history([plain]).switches == []


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.1, 0.9, None, 1.0, 1.2], [1.0, 1.2, 1.1, 0.9], "noise"),
        ([1.1, 0.9, None, 1.0, 1.2], [2.0, 2.2, 2.1, 1.9], "jump"),
        ([1.1, 0.9, None, 1.0, 1.2], [2.0, 2.2], "too few lines"),
        ([3.0 - 0.1 * place for place in range(20)], [1.0, 0.9, 0.8, 0.7], "drift"),
        ([3.0 - 0.1 * place for place in range(20)], [1.2, 1.2, 1.2, 1.2], "drift"),
        ([3.0 - 0.1 * place for place in range(20)], [2.0, 1.9, 1.8, 1.7], "jump"),
    ],
)
def test_a_jump_is_told_from_noise_and_from_a_falling_loss(
    tmp_path: Path, before: list[float | None], after: list[float], verdict: str
):
    """By two standard errors; losses of skipped updates are no numbers."""
    log = [*lines("plain", 0, before), *lines("offload", 200, after)]
    folders = [tmp_path / "plain", publish_state(tmp_path / "offload", log, {})]
    [switch] = read_history(folders).switches
    assert switch.jump is not None
    assert switch.jump.verdict == verdict
    assert switch.changes == {}


def test_the_error_of_a_jump_is_that_of_the_difference_of_two_means(tmp_path: Path):
    log = [*lines("plain", 0, [1.1, 0.9, 1.0, 1.2]), *lines("offload", 40, [2.0, 2.2, 2.1])]
    [switch] = read_history([publish_state(tmp_path / "offload", log, {})]).switches
    jump = switch.jump
    assert jump is not None
    assert jump.change == pytest.approx(2.1 - 1.05)
    assert jump.error == pytest.approx(math.sqrt(0.05 / 3 / 4 + 0.01 / 3))
    assert jump.drift is None


def test_a_phase_in_progress_is_read_without_the_line_being_written(tmp_path: Path):
    progress = tmp_path / "plain" / "progress"
    progress.mkdir(parents=True)
    (progress / "metrics.jsonl").write_text(
        '{"phase": "plain", "step": 1, "loss": 2.0}\n{"phase": "pl'
    )
    assert [line["step"] for line in read_history([tmp_path / "plain"]).steps] == [1]
    assert read_history([tmp_path / "later"]).lines == []


@pytest.mark.parametrize("written", ["not json", '{"step": 1}', '{"phase": "a", "step": true}'])
def test_a_damaged_line_is_named(tmp_path: Path, written: str):
    progress = tmp_path / "plain" / "progress"
    progress.mkdir(parents=True)
    (progress / "metrics.jsonl").write_text(f'{{"phase": "plain", "step": 1}}\n{written}\n')
    with pytest.raises(PipelineError, match=r"metrics\.jsonl: line 2 is .*not an object"):
        read_history([tmp_path / "plain"])
