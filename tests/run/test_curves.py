"""What a run logged: spans of phases, switches and their jumps in loss; a log that still grows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.builders.watched_runs import WatchedRun

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.run import curves
from zerotrain.run.curves import Curves, GrowingLog, ThinCurve
from zerotrain.run.view import RunView


def read_history(folders: list[Path]) -> Curves:
    """What the run of these phases logged."""
    return RunView("r", folders=folders).curves


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
    assert history.series("val_loss") == history.series("val_loss", "plain") == [(20, 0.7)]
    [switch] = history.switches
    assert (switch.step, switch.before, switch.after) == (20, "plain", "offload")
    assert switch.changes == {
        "preset": ("torch", "zero2_offload"),
        "engine": ("torch", "deepspeed"),
        "zero_stage": (0, 2),
    }
    assert read_history([plain]).switches == []


FALLING = [3.0 - 0.1 * place + 0.02 * (-1) ** place for place in range(20)]
"""Down to 1.1 at its end, with some noise."""


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.1, 0.9, None, 1.0, 1.2], [1.0, 1.2, 1.1, 0.9], "noise"),
        ([1.1, 0.9, None, 1.0, 1.2], [3.0, 3.2, 3.1, 2.9], "jump"),
        ([1.1, 0.9, None, 1.0, 1.2], [2.0, 2.2, 2.1], "too few lines"),
        (FALLING, [1.02, 0.88, 0.82, 0.68], "noise"),
        (FALLING, [1.52, 1.38, 1.32, 1.18], "jump"),
        ([1.0] * 4, [1.0] * 4, "noise"),
    ],
)
def test_a_jump_is_distinguished_from_noise_and_from_a_falling_loss(
    tmp_path: Path, before: list[float | None], after: list[float], verdict: str
):
    """A straight line through each side; losses of skipped updates are no numbers."""
    log = [*lines("plain", 0, before), *lines("offload", 10 * len(before), after)]
    folders = [tmp_path / "plain", publish_state(tmp_path / "offload", log, {})]
    [switch] = read_history(folders).switches
    assert switch.jump is not None
    assert switch.jump.verdict == verdict
    assert switch.changes == {}


def test_the_jump_is_that_of_numpys_least_squares(tmp_path: Path):
    """Value and error at the switch, from the middle of each line's ten steps."""
    before, after = [1.1, 0.9, 1.0, 1.2], [2.0, 2.2, 2.1, 1.7, 1.9]
    log = [*lines("plain", 0, before), *lines("offload", 40, after)]
    [switch] = read_history([publish_state(tmp_path / "offload", log, {})]).switches
    jump = switch.jump
    assert jump is not None
    edges, variances = [], []
    for places, values in ((np.arange(-35, 0, 10), before), (np.arange(5, 50, 10), after)):
        fit, covariance = np.polyfit(places, values, 1, cov=True)
        edges.append(fit[1])
        variances.append(covariance[1, 1])
    assert jump.size == pytest.approx(edges[1] - edges[0])
    assert jump.error == pytest.approx(math.sqrt(sum(variances)))
    assert jump.after.mean - jump.before.mean == pytest.approx(1.98 - 1.05)
    assert jump.before.spread == pytest.approx(np.std(before, ddof=1))


def test_a_phase_in_progress_is_read_without_the_line_being_written(tmp_path: Path):
    progress = tmp_path / "plain" / "progress"
    progress.mkdir(parents=True)
    (progress / "metrics.jsonl").write_text(
        '{"phase": "plain", "step": 1, "loss": 2.0}\n{"phase": "pl'
    )
    assert [line["step"] for line in read_history([tmp_path / "plain"]).steps] == [1]
    assert read_history([tmp_path / "later"]).lines == []


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("not json", "not valid JSON"),
        ('{"step": 1}', "phase: Field required"),
        ('{"phase": "a", "step": true}', "step: Input should be a valid integer"),
        ('{"phase": "a", "step": -1}', "step: Input should be greater"),
        ('{"phase": "a", "step": 2, "loss": "low"}', "loss: Input should be a valid number"),
        ('{"phase": "a", "step": 2, "loss": NaN}', "NaN is no finite number"),
        ("[" * 50_000, "its values are nested more than 50 deep"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, written: str, why: str):
    progress = tmp_path / "plain" / "progress"
    progress.mkdir(parents=True)
    (progress / "metrics.jsonl").write_text(f'{{"phase": "plain", "step": 1}}\n{written}\n')
    with pytest.raises(PipelineError, match=rf"metrics\.jsonl: line 2: {why}"):
        read_history([tmp_path / "plain"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedRun:
    """A run that has logged nothing yet."""
    monkeypatch.chdir(tmp_path)
    return WatchedRun()


def test_only_new_lines_are_read(run: WatchedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is read once it is whole; a log that starts again is read again."""
    path, tail = run.log("plain", 1, 2), GrowingLog()
    tail.read(path)
    read: list[bytes] = []
    monkeypatch.setattr(tail, "_add", lambda line, add=tail._add: (read.append(line), add(line)))
    with path.open("a") as stream:
        stream.write('{"phase": "plain", "step": 3, ')
    tail.read(path)
    assert read == []
    with path.open("a") as stream:
        stream.write('"loss": 0.25}\n')
    tail.read(path)
    assert (len(read), tail.newest["step"]) == (1, 3)
    path.write_text("")
    run.log("plain", 5)
    tail.read(path)
    assert tail.loss.points == [(5, 0.2)]


def test_a_long_log_is_sampled(run: WatchedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end as a whole, some lines of the rest; the curve keeps few points over all steps."""
    monkeypatch.setattr(curves, "WHOLE_BYTES", 2**17)
    monkeypatch.setattr(curves, "TAIL_BYTES", 2**14)
    path, tail = run.log("plain", *range(1, 1001)), GrowingLog()
    tail.read(path)
    steps = [step for step, _ in tail.loss.points]
    assert (steps[0], steps[-1]) == (1, 1000)
    assert 300 < len(steps) < 600
    assert steps == sorted(set(steps))
    assert steps[-20:] == list(range(981, 1001))
    curve = ThinCurve()
    for step in range(1, 10_001):
        curve.add(step, float(step))
    assert len(curve.points) <= curves.MOST_POINTS
    assert curve.points[-1] == (10_000, 9996.5)
    assert curve.points[0] == (8, 4.5)
