"""metrics.jsonl: what a training writes of its steps, its epochs and what was measured between."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.builders.phases import make_tiny_phase

from zerotrain.artifact.documents import check_type
from zerotrain.machine.memory_watch import MemoryUse, memory_now
from zerotrain.run.curves import Curves
from zerotrain.run.report.costs import memory_panels
from zerotrain.run.report.figures import Missing
from zerotrain.run.view import RunView
from zerotrain.training.reporting.log import Log, Means, PendingMeans

MEMORY = [{"device": MemoryUse(0, 0, 0), "host": MemoryUse(10, 12, 20)}]


def opened(progress: Path, step: int = 0, records: Path | None = None, **changes: Any) -> Log:
    """The log of a phase of 4 samples a step, 24 an epoch, that ends at step 14."""
    values: dict[str, Any] = {"report_to": [], "max_length": 8, "resolution": None, "log_every": 4}
    phase = make_tiny_phase("a", "torch", 14).with_values(**{**values, **changes})
    progress.mkdir(exist_ok=True)
    return Log(progress, phase, records, step, 4 * step, torch.device("cpu"), same_phase=True)


def steps(log: Log, first: int, last: int) -> None:
    """Steps with losses 1 / step, in all their parts."""
    for step in range(first, last + 1):
        for part in ("data", "forward", "backward", "optimizer"):
            log.lap(part)
        log.step(step, 4 * step, 1 / step, 2.0, 1e-3, [memory_now()])


def lines(progress: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (progress / "metrics.jsonl").read_text().splitlines()]


def values(progress: Path) -> list[dict[str, Any]]:
    """The lines without times and memory."""
    return [
        {k: value for k, value in line.items() if "second" not in k and "bytes" not in k}
        for line in lines(progress)
    ]


def test_a_line_has_the_mean_of_its_steps_and_the_time_of_each_part(tmp_path, monkeypatch) -> None:
    """Every log_every steps and at the end of the phase; here each part of a step takes 1 s."""
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    log = opened(tmp_path)
    steps(log, 1, 14)
    found = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in found] == [4, 8, 12, 14]
    assert found[1]["loss"] == sum(1 / step for step in range(5, 9)) / 4
    assert (found[1]["samples"], found[1]["epoch"]) == (32, round(32 / 24, 4))
    assert found[1].keys() == {
        *("phase", "step", "samples", "epoch", "loss", "grad_norm", "learning_rate"),
        *("seconds", "samples_per_second", "host_bytes", "device_bytes"),
        *(f"seconds_{part}" for part in ("data", "forward", "backward", "optimizer")),
    }
    parts = [value for key, value in found[1].items() if key.startswith("seconds_")]
    assert parts == [1.0, 1.0, 1.0, 1.0]


def test_text_has_the_perplexity_of_each_epoch(tmp_path, capsys) -> None:
    """exp of the mean loss over the epoch's steps, in a line of its own; the screen has no line for
    each epoch, and its next line has the newest."""
    log = opened(tmp_path)
    steps(log, 1, 14)
    epochs = [line for line in lines(tmp_path) if "train_perplexity" in line]
    assert [(line["step"], line["epoch"]) for line in epochs] == [(6, 1), (12, 2)]
    mean = sum(1 / step for step in range(7, 13)) / 6
    assert epochs[1]["train_perplexity"] == pytest.approx(math.exp(mean), rel=1e-15)
    assert epochs[1]["train_epoch_loss"] == pytest.approx(mean, rel=1e-15)
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in shown] == ["a: step 1 of 14", "a: step 14 of 14"]
    assert f", lr 1.00e-03, perplexity {math.exp(mean):.4f} in epoch 2, " in shown[1]


def test_images_have_no_perplexity(tmp_path) -> None:
    """It would be a number without a meaning."""
    log = opened(tmp_path, max_length=None, resolution=64)
    steps(log, 1, 14)
    assert all("loss" in line for line in lines(tmp_path))


def test_a_loss_too_large_for_a_perplexity_is_no_number(tmp_path) -> None:
    """The file stays JSON."""
    log = opened(tmp_path)
    for step in range(1, 7):
        log.step(step, 4 * step, 1e4, 1.0, 1e-3, [memory_now()])
    assert lines(tmp_path)[-1]["train_perplexity"] is None


@pytest.mark.parametrize("cut", [3, 6, 9])
def test_a_log_continues_from_a_checkpoints_records(tmp_path, cut) -> None:
    """Killed three steps after a checkpoint: lines, means and epochs are the undisturbed ones."""
    steps(opened(tmp_path / "whole"), 1, 14)
    killed = tmp_path / "killed"
    first = opened(killed)
    steps(first, 1, cut)
    first.memory(MEMORY, (20, 0))
    first.write_records(tmp_path / "records")
    steps(first, cut + 1, cut + 3)
    steps(opened(killed, cut, tmp_path / "records"), cut + 1, 14)
    assert values(killed) == values(tmp_path / "whole")


def test_what_a_validation_finds_is_a_line_that_curves_leave_out(tmp_path) -> None:
    """It is in the log with its own names; a reader of the loss does not meet it."""
    log = opened(tmp_path)
    steps(log, 1, 4)
    log.record_validation(4, {"val_loss": 0.5, "val_perplexity": 1.6})
    expected = {"phase": "a", "step": 4, "val_loss": 0.5, "val_perplexity": 1.6}
    assert lines(tmp_path)[-1] == expected
    assert [line["step"] for line in Curves(lines(tmp_path)).steps] == [4]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path, value) -> None:
    """JSON has no word for it: every reader of the file can read every line. No tracker has it."""
    log = opened(tmp_path)
    sent: list[Any] = []
    log._trackers = [SimpleNamespace(log=lambda values, step: sent.append(values))]
    log.record_validation(4, {"val_loss": value, "val_perplexity": 2.0})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert found == {"phase": "a", "step": 4, "val_loss": None, "val_perplexity": 2.0}
    assert sent == [{"val_perplexity": 2.0}]


def test_a_failed_device_and_a_failed_tracker_do_not_keep_the_rest_open(tmp_path) -> None:
    """A fault of a GPU is raised by every later call, also when the times are read at the end: it
    would hide what failed first. What else fails is raised, after all has been closed."""
    log = opened(tmp_path)
    steps(log, 1, 2)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    closed: list[str] = []

    def full() -> None:
        closed.append("board")
        raise OSError("full")

    log._time.take = fail
    log._trackers = [SimpleNamespace(close=full), SimpleNamespace(close=lambda: closed.append("w"))]
    with pytest.raises(OSError, match="full"):
        log.close()
    assert closed == ["board", "w"]
    assert log._stream.closed


def test_records_have_what_all_starts_used_of_time_and_this_one_of_memory(tmp_path) -> None:
    """Times and the process's peaks continue over the starts of a phase."""
    first = opened(tmp_path / "progress")
    steps(first, 1, 4)
    first.lap("save")
    first.memory(MEMORY, (500, 7))
    first.write_records(tmp_path / "first")
    before = json.loads((tmp_path / "first" / "resources.json").read_text())
    assert (before["train_host_begin_bytes"], before["train_host_total_peak_bytes"]) == (10, 20)
    before |= {"train_seconds": 1000.0, "backward_seconds": 900.0}
    (tmp_path / "first" / "resources.json").write_text(json.dumps(before))
    second = opened(tmp_path / "progress", 4, tmp_path / "first")
    steps(second, 5, 6)
    second.memory([{"device": MemoryUse(0, 0, 0), "host": MemoryUse(11, 11, 11)}], (30, 9))
    second.write_records(tmp_path / "second")
    after = json.loads((tmp_path / "second" / "resources.json").read_text())
    assert (after["peak_host_bytes"], after["peak_device_bytes"]) == (500, 9)
    assert after["train_host_total_peak_bytes"] == 11
    assert 1000 <= after["train_seconds"] < 1100
    assert 900 <= after["backward_seconds"] < 1000


def test_the_end_says_where_the_time_went_and_what_memory_it_took(tmp_path, capsys) -> None:
    """A sentence each; a phase without a step has none."""
    log = opened(tmp_path)
    steps(log, 1, 14)
    log.memory(MEMORY, (20, 0))
    log.close()
    said = capsys.readouterr().err
    assert "a: 14 steps in 0:00: " in said
    assert "a: host memory of training: " in said
    opened(tmp_path).close()
    assert "steps in" not in capsys.readouterr().err


def test_memory_is_that_of_all_processes(training) -> None:
    """Two processes: the host's numbers are their sum, which is more than either has alone; a line
    of the log has a number for each, also of a step that is logged as the last one."""
    training.run("two", "torch", 3, num_processes=2, log_every=2, report_to=["tensorboard"])
    lines = training.log("two")
    assert [line["step"] for line in lines] == [2, 3]
    for line in lines:
        [first, second] = line["host_bytes_by_rank"]
        assert first == line["host_bytes"] != second
        assert second > 2**20
        assert line["device_bytes_by_rank"] == [0, 0]
    [panel] = memory_panels(RunView("r", folders=[training.progress("two").parent]), Missing())
    assert panel.table is not None
    assert [row[0] for row in panel.table.rows] == ["rank 0", "rank 1"]
    text = (training.rolling("two", 3) / "records/resources.json").read_text()
    used = json.loads(text)
    assert 1.2 * used["peak_host_bytes"] < used["train_host_total_peak_bytes"]
    assert used["train_host_begin_bytes"] <= used["train_host_total_peak_bytes"]
    assert used["forward_seconds"] > 0
    assert used["backward_seconds"] > 0


EPOCH, BATCH = 10, 4


def feed(means: Means, first: int, last: int) -> dict[int, float]:
    """Steps with losses 1 / step; the epochs that ended, with their means."""
    found = {}
    for step in range(first, last + 1):
        means.add(1 / step, float(step))
        if ended := means.epoch_loss(step * BATCH, BATCH):
            found[ended[0]] = ended[1]
    return found


def mean(first: int, last: int) -> float:
    """The mean of these losses, added in their order."""
    total = 0.0
    for step in range(first, last + 1):
        total += 1 / step
    return total / (last - first + 1)


def test_an_epoch_ends_with_the_step_that_reaches_its_end() -> None:
    """Of 10 samples by 4 the first epoch has steps 1 to 3, the second 4 and 5, and so on: each step
    counts once."""
    assert feed(Means(0, EPOCH), 1, 8) == {1: mean(1, 3), 2: mean(4, 5), 3: mean(6, 8)}


@pytest.mark.parametrize("cut", range(1, 8))
def test_means_continue_from_a_checkpoint_to_the_last_bit(cut: int) -> None:
    """Whatever step a training is cut at, the line after it and every epoch are those of an
    undisturbed one."""
    whole = Means(0, EPOCH)
    expected = feed(whole, 1, 8)
    first = Means(0, EPOCH)
    found = feed(first, 1, cut)
    second = Means(cut * BATCH, EPOCH)
    stored = json.loads(json.dumps(asdict(first.state()), allow_nan=False))
    second.load(check_type(stored, PendingMeans, "pending.json"), same_phase=True)
    assert found | feed(second, cut + 1, 8) == expected
    assert second.take() == whole.take()


def test_a_phase_that_begins_amid_an_epoch_has_its_own_line_but_the_runs_epoch() -> None:
    """The first line of a phase is of its own steps; the epoch has those of the phase before."""
    before = Means(0, EPOCH)
    feed(before, 1, 4)
    after = Means(16, EPOCH)
    after.load(before.state(), same_phase=False)
    assert feed(after, 5, 5) == {2: mean(4, 5)}
    assert after.take()["loss"] == 1 / 5


def test_an_epoch_that_began_in_another_program_has_no_mean() -> None:
    """Without the steps before there would be a number of another meaning."""
    assert feed(Means(16, EPOCH), 5, 8) == {3: mean(6, 8)}


def test_steps_that_fp16_left_out_are_counted_and_not_averaged() -> None:
    """An infinite norm is no part of the mean; a line of such steps alone has none."""
    means = Means(0, EPOCH)
    means.add(1.0, 2.0)
    means.add(3.0, math.inf)
    assert means.take() == {"loss": 2.0, "grad_norm": 2.0, "skipped": 1}
    means.add(3.0, math.inf)
    assert means.take() == {"loss": 3.0, "grad_norm": None, "skipped": 1}
