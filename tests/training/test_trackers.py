"""Trackers get every point once, and whatever happens to them the training continues."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.builders.phases import make_tiny_phase

from zerotrain.artifact.layout import LOG
from zerotrain.config.trackers import TENSORBOARD
from zerotrain.training.reporting import trackers
from zerotrain.training.reporting.trackers import hyperparameters, open_trackers, points_of


class FakeWandb(ModuleType):
    """wandb's calls as accelerate makes them, noted."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []
        self.points: list[tuple[int, dict[str, float]]] = []
        self.configured: list[dict[str, Any]] = []
        self.finished = 0
        self.log: Callable[..., None] = lambda values, step: self.points.append((step, values))
        self.config = SimpleNamespace(
            update=lambda values, allow_val_change: self.configured.append(values)
        )

    def init(
        self, *, project: str, name: str, group: str, dir: str, id: str, resume: str
    ) -> SimpleNamespace:
        self.runs.append({"project": project, "name": name, "group": group, "id": id})
        assert resume == "allow"
        return SimpleNamespace(log=lambda values, step: self.log(values, step), finish=self._finish)

    def _finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    found = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def phase(*names: str, **changes: Any) -> Any:
    return make_tiny_phase("a", "torch", 20).with_values(report_to=list(names), **changes)


def write_log(progress: Path, lines: list[tuple[int, dict[str, float]]]) -> None:
    """The log of the run so far, as a start takes it from its checkpoint."""
    text = "".join(json.dumps({"phase": "a", "step": s, **values}) + "\n" for s, values in lines)
    (progress / LOG).write_text(text)


def report(progress: Path, first: int, last: int, *names: str, **changes: Any) -> list[str]:
    """Steps first to last of a training; what the trackers had to say."""
    said: list[str] = []
    write_log(progress, [(step, {"loss": 1 / step, "samples": step}) for step in range(1, first)])
    opened = open_trackers(phase(*names, **changes), progress, first - 1, said.append)
    for step in range(first, last + 1):
        for tracker in opened:
            tracker.log({"train/loss": 1 / step}, step)
    for tracker in opened:
        tracker.close()
    return said


def test_a_training_that_continues_does_so_in_its_run(tmp_path, wandb) -> None:
    """Steps that are made again after a crash are not sent again."""
    assert report(tmp_path, 1, 5, "wandb") == []
    assert report(tmp_path, 4, 8, "wandb") == []
    assert wandb.points == [(step, {"train/loss": 1 / step}) for step in range(1, 9)]
    first, second = wandb.runs
    assert first == second
    assert (first["project"], first["name"], first["group"]) == ("zerotrain", "tiny-a", "tiny")
    assert len(wandb.configured) == 1
    assert wandb.configured[0]["learning_rate"] == 1e-3
    assert wandb.configured[0]["report_to"] == '["wandb"]'
    assert wandb.finished == 2


def test_a_run_has_the_users_names(tmp_path, wandb) -> None:
    """tracker_project_name and tracker_run_name."""
    report(tmp_path, 1, 1, "wandb", tracker_project_name="cats", tracker_run_name="first")
    assert (wandb.runs[0]["project"], wandb.runs[0]["name"]) == ("cats", "first")


def test_a_tracker_that_fails_is_reported_once_and_takes_later_points(tmp_path, wandb) -> None:
    """A network that is away for some steps costs those points of that tracker alone."""

    def log(values: dict[str, float], step: int) -> None:
        if step in (2, 3):
            raise ConnectionError("no route to host\nand more")
        wandb.points.append((step, values))

    wandb.log = log
    said = report(tmp_path, 1, 5, "wandb", TENSORBOARD)
    assert [step for step, _ in wandb.points] == [1, 4, 5]
    [sentence] = said
    assert sentence == (
        "a: tracker wandb has failed at step 2: ConnectionError: no route to host; training "
        "continues, and metrics.jsonl has everything"
    )
    assert [step for step, _ in board(tmp_path, "train/loss")] == [1, 2, 3, 4, 5]


def test_a_tracker_that_cannot_be_started_is_reported_once(tmp_path, wandb, monkeypatch) -> None:
    """Without an account, say: a sentence, no point, no error."""

    def init(**_: Any) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(wandb, "init", init)
    [sentence] = report(tmp_path, 1, 5, "wandb")
    assert "tracker wandb could not be started: RuntimeError: api_key not configured" in sentence


def test_a_tracker_that_hangs_holds_nothing_up(tmp_path, wandb, monkeypatch) -> None:
    """Neither a step nor, for longer than it is granted, the end; what it has no room for is left
    out and reported."""
    monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 0.05)
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    release = threading.Event()
    wandb.log = lambda values, step: release.wait(20)
    said = report(tmp_path, 1, 20, "wandb")
    release.set()
    assert ["is too slow" in said[0], "has not finished within" in said[1]] == [True, True]
    assert len(said) == 2


def board(progress: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a curve as TensorBoard shows them."""
    found = EventAccumulator(str(progress / TENSORBOARD))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_tensorboard_shows_each_step_once_after_a_crash(tmp_path) -> None:
    """What a killed process wrote beyond the checkpoint is purged."""
    report(tmp_path, 1, 5, TENSORBOARD)
    report(tmp_path, 4, 8, TENSORBOARD)
    assert [step for step, _ in board(tmp_path, "train/loss")] == list(range(1, 9))


def test_a_validations_points_are_neither_lost_nor_sent_twice(tmp_path, wandb) -> None:
    """Of a start that was killed between a step's two sets, and of one that ended with both."""
    points: list[tuple[int, dict[str, float]]] = [
        *((0, {"val_loss": 3.0}), (1, {"train/loss": 2.0}), (2, {"train/loss": 1.0})),
        (2, {"val_loss": 0.5}),
    ]
    for first, last in ((0, 1), (0, 3), (1, 3), (2, 4), (3, 4), (0, 4)):
        said: list[str] = []
        write_log(tmp_path, [(s, _logged(values)) for s, values in points[:first]])
        opened = open_trackers(phase("wandb", TENSORBOARD), tmp_path, points[first][0], said.append)
        for tracker in opened:
            for step, values in points[first:last]:
                tracker.log(values, step)
            tracker.close()
        assert said == []
    assert wandb.points == points
    assert board(tmp_path, "val_loss") == [(0, 3.0), (2, 0.5)]


def _logged(values: dict[str, float]) -> dict[str, float]:
    """Values as a line of the log has them, which names a step's own without `train/`."""
    own = {name.removeprefix("train/"): value for name, value in values.items()}
    return {"samples": 1, **own} if "loss" in own else own


def test_tensorboard_has_what_a_lower_until_purged(tmp_path) -> None:
    """Stopped at step 6, trained again from 4 to a lower `until`, and from 6 once it is raised:
    the later checkpoint serves again, and its points are there."""
    report(tmp_path, 1, 6, TENSORBOARD)
    report(tmp_path, 5, 5, TENSORBOARD)
    report(tmp_path, 7, 9, TENSORBOARD)
    assert board(tmp_path, "train/loss") == [
        (step, pytest.approx(1 / step)) for step in range(1, 10)
    ]


def test_a_step_that_logs_more_than_its_loss_is_one_set_of_points() -> None:
    """Lines of steps, epochs and validations give the names that the trackers know; no lists."""
    assert points_of({"phase": "a", "step": 2, "samples": 8, "epoch": 0.5, "loss": 1.0,
                      "grad_norm": None, "learning_rate": 0.1, "seconds": 3.0,
                      "host_bytes_by_rank": [1, 2]}) == {
        "train/loss": 1.0, "train/learning_rate": 0.1}  # fmt: skip
    assert points_of({"phase": "a", "step": 2, "epoch": 1, "train_epoch_loss": 2.0,
                      "train_perplexity": None}) == {"train/epoch_loss": 2.0}  # fmt: skip
    assert points_of({"phase": "a", "step": 2, "val_loss": 2.0}) == {"val_loss": 2.0}


def test_hyperparameters_are_plain_values() -> None:
    """Every tracker takes them: no list or mapping is among them."""
    found = dict(hyperparameters(phase("wandb")))
    assert found["objective"] == '{"snr_gamma": 5.0}'
    assert all(isinstance(value, bool | int | float | str | None) for value in found.values())
