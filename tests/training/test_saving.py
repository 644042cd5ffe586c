"""A checkpoint is written during the next step, and holds the step at which it began."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.builders.states import publish_checkpoint, save_steps
from tests.training.measures import SETTINGS
from tests.training.saving_trials import SIZE, Engine, Log, made, phase, values

from zerotrain import artifact
from zerotrain.artifact import publication
from zerotrain.artifact.leftovers import hold
from zerotrain.config import optimizers
from zerotrain.errors import PipelineError
from zerotrain.models.sizes import ModelSizes
from zerotrain.state.checkpoint import Checkpoint, Fragment
from zerotrain.state.position import EMA_SLOT, MASTER, StepCounter
from zerotrain.training.checkpointing import checkpoint_room, progress_folder, rank_writer, saving
from zerotrain.training.checkpointing.progress_folder import prune, saved_steps, step_folder
from zerotrain.training.checkpointing.saving import Saving
from zerotrain.training.reporting.validation import Validation
from zerotrain.training.reporting.validation_history import ValidationHistory, best_step


def test_a_step_during_the_writing_is_not_in_the_checkpoint(tmp_path: Path, gate) -> None:
    """The tensors change while none is written yet; it is not there before it is whole."""
    engine = Engine()
    engine.step()
    log = Log()
    with made(engine, tmp_path / "p", log) as saved:
        saved.begin(StepCounter(1, 4, 100))
        assert saved.is_writing()
        log.said.append("later")
        saved.wait_or_stage_tensors(writing=True)
        engine.step()
        assert saved_steps(tmp_path / "p") == []
        gate.release(3)
        saved.finish()
        assert not saved.is_writing()
    assert values(tmp_path / "p", 1) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert json.loads((tmp_path / "p/step-00000001/records/said.json").read_text()) == []
    assert Checkpoint(step_folder(tmp_path / "p", 1)).position.optimizer_step == 1


def test_no_more_than_a_shard_is_copied(tmp_path: Path, gate, monkeypatch) -> None:
    """Of three tensors that are not written yet, one fits into the allowance and is copied; the
    loop waits for the others, and the copies never take more."""
    allowance = SIZE * 4 + 100
    monkeypatch.setattr(saving, "SHARD_BYTES", allowance)
    copied: list[bool] = []

    class Counted(rank_writer.Staging):
        def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
            found = super().copy(tensor)
            copied.append(found is not None)
            return found

    monkeypatch.setattr(rank_writer, "Staging", Counted)
    engine = Engine()
    with made(engine, tmp_path / "p") as saved:
        saved.begin(StepCounter(1, 4, 100))
        settled = threading.Thread(target=saved.wait_or_stage_tensors, args=(True,))
        settled.start()
        gate.release(1)
        settled.join(0.3)
        assert settled.is_alive()  # two tensors are lent out, and there is room for one copy
        gate.release(1)
        # The second is read from where it lies, so that it must be done before the loop goes on.
        settled.join(0.3)
        gate.release(1)
        settled.join(20)
        assert not settled.is_alive()
        engine.step()
    assert copied.count(True) == 1
    assert copied.count(False) >= 1
    assert values(tmp_path / "p", 1) == {"a": 0.0, "b": 0.0, "c": 0.0}


class Swapping(Engine):
    """Each tensor lies in the memory of the one before."""

    steady = False

    def fragments(self) -> Iterator[Fragment]:
        buffer = torch.empty(SIZE)
        for number, name in enumerate(self.held):
            yield Fragment(name, 0, {MASTER: buffer.fill_(number)})


def test_an_engine_whose_buffers_are_reused_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written before begin returns; a thread hashes it during the next steps."""
    gate = threading.Event()

    def hashed(path: Path) -> str:
        assert gate.wait(20)
        return artifact.file_sha256(path)

    monkeypatch.setattr(rank_writer, "file_sha256", hashed)
    engine = Swapping()
    with made(engine, tmp_path / "p") as saved:
        saved.begin(StepCounter(1, 4, 100))
        assert saved.is_writing()
        saved.wait_or_stage_tensors(writing=True)  # it waits for nothing
        engine.step()
        assert saved_steps(tmp_path / "p") == []
        gate.set()
        saved.finish()
        assert not saved.is_writing()
        assert values(tmp_path / "p", 1) == {"a": 0.0, "b": 1.0, "c": 2.0}


def test_each_process_hashes_what_it_has_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever publishes reads none of the tensors."""
    read: list[str] = []

    def counted(path: Path) -> str:
        read.append(path.name)
        return artifact.file_sha256(path)

    monkeypatch.setattr(publication, "file_sha256", counted)
    with made(Swapping(), tmp_path / "p") as saved:
        saved.begin(StepCounter(1, 4, 100), wait=True)
    assert read
    assert not [name for name in read if name.endswith(".safetensors")]
    artifact.read(step_folder(tmp_path / "p", 1), "checkpoint")
    engine = Swapping()
    for rank in (0, 1):
        part = rank_writer.WrittenPart(tmp_path, rank, engine.fragments())
        assert list(part.result().known) == [f"rank-{rank:05d}-00000.safetensors"]


def _of_another_machine(size: int) -> rank_writer.PartReport:
    """What rank 1 tells of a file of so many bytes."""
    return rank_writer.PartReport(
        known={"rank-00001-00000.safetensors": "0" * 64},
        sizes={"rank-00001-00000.safetensors": size},
        host="node-b",
    )


@pytest.mark.parametrize(
    ("seen", "said"),
    [(None, "is missing"), (b"x" * 7, "has 7 bytes"), (b"x" * 9, "has 9 bytes"), (b"x" * 8, "")],
)
def test_a_file_that_the_first_process_does_not_see_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bytes | None, said: str
) -> None:
    """Each process names its files with their sizes; the checkpoint before it stays."""
    monkeypatch.setattr(saving.ranks, "gather", lambda own: [own, _of_another_machine(8)])
    name = "rank-00001-00000.safetensors"
    with made(Engine(), tmp_path / "p") as saved:
        saved.begin(StepCounter(1, 4, 100))
        (draft,) = (tmp_path / "p").glob(".step-*")
        if seen is not None:
            (draft / name).write_bytes(seen)
        if not said:
            saved.finish()
            found = artifact.read(step_folder(tmp_path / "p", 1), "checkpoint", verify=False)
            assert found.files[name] == {"bytes": 8, "sha256": "0" * 64}
            return
        with pytest.raises(PipelineError) as error:
            saved.finish()
    assert f"{name}, which rank 1 on node-b wrote with 8 bytes, {said}" in error.value.what
    assert "file system that all machines see" in str(error.value.hint)
    assert list((tmp_path / "p").iterdir()) == []


def test_each_process_tells_the_sizes_of_its_files(tmp_path: Path) -> None:
    """Whether its tensors are written at once or by a thread."""
    for rank, writer in enumerate((rank_writer.WrittenPart, rank_writer.RankWriter)):
        told = writer(tmp_path, rank, Engine().fragments()).result()
        (path,) = tmp_path.glob(f"rank-{rank:05d}-*")
        assert told.sizes == {path.name: path.stat().st_size}
        assert told.host == socket.gethostname()


def test_an_error_of_the_loop_loses_no_checkpoint_that_has_started(tmp_path: Path, gate) -> None:
    """What is on its way when a step fails is brought to its end."""

    def fail(saved: Saving) -> None:
        with saved:
            saved.begin(StepCounter(1, 4, 100))
            gate.release(3)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail(made(Engine(), tmp_path / "p"))
    assert saved_steps(tmp_path / "p") == [1]


def test_a_failure_to_publish_reaches_all_ranks(tmp_path: Path, monkeypatch) -> None:
    """Only the first process publishes; the others end by its sentence, and not by a time-out."""
    told: list[Any] = []

    def broadcast(value: Any) -> Any:
        told.append(value)
        return value

    monkeypatch.setattr(saving.ranks, "broadcast", broadcast)

    def failing(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "write_position", failing)
    with made(Engine(), tmp_path / "p") as saved:
        saved.begin(StepCounter(1, 4, 100))
        with pytest.raises(PipelineError, match="step 1 was not written") as first:
            saved.finish()
    assert told[-1] == (None, (first.value.what, first.value.hint))
    assert list((tmp_path / "p").iterdir()) == []
    other = Engine()
    other.rank = 1
    answers = [(tmp_path, None), told[-1]]
    monkeypatch.setattr(saving.ranks, "broadcast", lambda _: answers.pop(0))
    with made(other, tmp_path / "q") as saved:
        saved.begin(StepCounter(1, 4, 100))
        with pytest.raises(PipelineError, match="the checkpoint of step 1 was not written"):
            saved.finish()
    assert not answers


def test_due_by_steps_and_for_good(tmp_path: Path) -> None:
    """Both intervals count from the start of the run."""
    saved = made(Engine(), tmp_path, save_every=20, keep_every=50)
    assert [step for step in range(1, 101) if saved.is_due(step)] == [20, 40, 50, 60, 80, 100]
    assert not saved.is_overdue()


def test_due_by_the_clock_of_the_first_process(tmp_path: Path, monkeypatch) -> None:
    """Minutes count from the last save; other processes' clocks say nothing."""
    now = [1000.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    saved = made(Engine(), tmp_path, save_every="2 min")
    other = Engine()
    other.rank = 1
    beside = made(other, tmp_path, save_every="2 min")
    now[0] += 119
    assert not saved.is_overdue()
    now[0] += 1
    assert saved.is_overdue()
    assert not beside.is_overdue()
    assert not any(saved.is_due(step) for step in range(1, 101))
    saved.begin(StepCounter(1, 4, 100), wait=True)
    assert not saved.is_overdue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "changes"), [("zero2_offload", {}), ("zero3", {}), ("zero2", {"num_processes": 2})]
)
def test_a_save_at_every_step_changes_nothing(training, preset, changes) -> None:
    """Neither the average nor the end, and every checkpoint is that of its own step."""
    changes = {"use_ema": True, "ema_decay": 0.9, **changes}
    whole = training.run("plain", preset, 6, **changes)
    assert training.run("often", preset, 6, save_every=1, keep=6, **changes) == whole
    assert training.hashes("often", 6) == training.hashes("plain", 6)
    training.run("short", preset, 3, **changes)
    assert training.hashes("often", 3) == training.hashes("short", 3)


def test_prune_keeps_what_serves_later(tmp_path: Path) -> None:
    """Beside the newest: every step that keep_every divides, and the one that validated best."""
    save_steps(tmp_path, 10, 20, 30, 40, 50, 60)
    (tmp_path / "best.json").write_text('{"step": 30, "metric": "val_loss", "value": 1.0}')
    prune(tmp_path, 1, 60, keep_every=20)
    assert saved_steps(tmp_path) == [20, 30, 40, 60]
    (tmp_path / "best.json").write_text("half a li")
    prune(tmp_path, 1, 60)
    assert saved_steps(tmp_path) == [60]


def test_the_best_stays_until_a_better_one_is_written(tmp_path: Path, gate, monkeypatch) -> None:
    """A kill while the new best one is on its way costs neither."""
    found = {400: 2.0, 490: 3.0, 500: 1.0}
    monkeypatch.setattr(Validation, "_measure", lambda _, step: {"val_loss": found[step]})
    rule = {**SETTINGS, "eval_steps": 10}
    values = phase(until_step=1000, save_every=90, keep=1, validation=rule)
    engine: Any = Engine()
    nothing: Any = None
    history = ValidationHistory(0)
    validation = Validation(engine, nothing, [], values, history, Log(), tmp_path)
    with Saving(engine, values, Log(), tmp_path, None, validation.write_records) as saved:
        gate.release(6)
        for step in (400, 490):
            assert validation.at(step).save == (step == 400)
            saved.begin(StepCounter(step, step, 1000))
        assert validation.at(500).save
        saved.begin(StepCounter(500, 500, 1000))
        assert saved_steps(tmp_path) == [400, 490]
        assert best_step(tmp_path) == 400
        gate.release(3)
        saved.finish()
        assert best_step(tmp_path) == 500
    assert saved_steps(tmp_path) == [500]


def test_prune_leaves_a_checkpoint_that_is_read(tmp_path: Path) -> None:
    """An export by hand of a rolling checkpoint finds its files to the end; then it goes."""
    progress = tmp_path
    for step in (1, 2, 3):
        publish_checkpoint(step_folder(progress, step), step)
    reading = Checkpoint(step_folder(progress, 1))
    prune(progress, 1, 3)
    assert saved_steps(progress) == [1, 3]
    assert all(reading.tensor(name, MASTER).numel() for name in reading.names)
    del reading
    prune(progress, 1, 3)
    assert saved_steps(progress) == [3]


def test_two_readers_hold_one_folder(tmp_path: Path) -> None:
    """Readers do not wait for each other, and what is not there is nothing to hold."""
    save_steps(tmp_path, 1, 2)
    first, second = (hold(step_folder(tmp_path, 1)) for _ in range(2))
    assert first is not None
    assert second is not None
    first.close()
    prune(tmp_path, 1, 2)
    assert saved_steps(tmp_path) == [1, 2]
    second.close()
    prune(tmp_path, 1, 2)
    assert saved_steps(tmp_path) == [2]
    assert hold(step_folder(tmp_path, 1)) is None


def test_prune_removes_nothing_for_a_newest_that_is_not_whole(tmp_path: Path) -> None:
    """The last good one stays where a file of the newest was cut off."""
    save_steps(tmp_path, 1, 2)
    (step_folder(tmp_path, 2) / "rank-00000-00000.safetensors").write_bytes(b"x")
    prune(tmp_path, 1, 2)
    assert saved_steps(tmp_path) == [1, 2]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A disk of 100 bytes that holds the checkpoints' files."""
    total = SimpleNamespace(bytes=100)

    def used(*folders: Path) -> int:
        return sum(path.stat().st_size for one in folders for path in one.glob("rank-*"))

    def usage(folder: Path) -> Any:
        return SimpleNamespace(free=total.bytes - used(*folder.glob("step-*")))

    monkeypatch.setattr(checkpoint_room.shutil, "disk_usage", usage)
    monkeypatch.setattr(checkpoint_room, "freed_bytes", used)
    return total


def test_room_is_made_for_the_next_checkpoint(tmp_path: Path, disk) -> None:
    """The oldest goes before its time, and is named; the newest, the best and those kept for good
    never do. Where they alone do not leave enough, nothing is removed nor written, and the sentence
    has the figures."""
    save_steps(tmp_path, 1, 2, 3, 4, size=25)
    (tmp_path / "best.json").write_text('{"step": 2}')
    for too_much, keep_every in ((51, None), (26, 3), (1, 1)):
        with pytest.raises(PipelineError):
            checkpoint_room.make_room(tmp_path, 5, too_much, keep_every)
        assert saved_steps(tmp_path) == [1, 2, 3, 4]
    assert len(checkpoint_room.make_room(tmp_path, 5, 50)) == 2
    assert saved_steps(tmp_path) == [2, 4]
    assert checkpoint_room.make_room(tmp_path, 5, 50) == []
    with pytest.raises(PipelineError) as caught:
        checkpoint_room.make_room(tmp_path, 5, 51)
    assert saved_steps(tmp_path) == [2, 4]
    assert "0.1 kB free, and the checkpoint of step 5 takes 0.1 kB" in str(caught.value)
    assert "continues from step 4" in caught.value.hint


def test_the_disk_is_compared_before_the_start(tmp_path: Path, disk) -> None:
    """Two of a checkpoint's size must fit, the one before and the new one; where not all of those
    that are to be kept do, it is reported. What is there already needs no more room."""
    sizes = ModelSizes(2, 2, 1, "", 1, 1)  # of 2 trained parameters: 24 bytes with Adam's moments
    adam = phase(optimizer="adamw", save_every=10, keep=3)
    assert checkpoint_room.forecast(adam, sizes) == 24
    assert checkpoint_room.forecast(adam.with_values(use_ema=True), sizes) == 32
    disk.bytes = 3 * 24 + 24 + 8
    assert checkpoint_room.check_room(tmp_path, adam, sizes) == []
    disk.bytes = 95
    kept, _ = checkpoint_room.check_room(tmp_path, adam, sizes)
    assert "all that are to be kept need 0.1 kB: the oldest will be removed" in kept
    assert checkpoint_room.check_room(tmp_path, adam.with_values(keep=2), sizes) == []
    assert checkpoint_room.check_room(tmp_path, adam.with_values(keep=2, keep_every=50), sizes)
    disk.bytes = 48
    assert checkpoint_room.check_room(tmp_path, adam, sizes)
    disk.bytes = 47
    with pytest.raises(PipelineError, match="since the one before stays until"):
        checkpoint_room.check_room(tmp_path, adam, sizes)
    once = adam.with_values(save_every=100)
    [export] = checkpoint_room.check_room(tmp_path, once, sizes)
    assert "its export takes up to" in export
    save_steps(tmp_path, 10, size=23)
    assert checkpoint_room.check_room(tmp_path, adam, sizes)


def test_the_export_is_counted_before_the_start(
    tmp_path: Path, disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last checkpoints leave has to hold state and weights: a byte less, and the start
    says that the export would fail, after which step, and how much to free. Where the run's folder
    is on another disk, it is that one that counts."""
    sizes = ModelSizes(100_000, 25_000, 1, "", 1, 1)
    adam = phase(optimizer="adamw", save_every=10, keep=2)
    each, weights = 300_000, 400_000
    disk.bytes = 2 * each + each + weights
    assert checkpoint_room.check_room(tmp_path, adam, sizes) == []
    disk.bytes -= 100_000
    [said] = checkpoint_room.check_room(tmp_path, adam, sizes)
    assert said == (
        "phase a: its export takes up to 0.7 MB (the state 0.3 MB, the weights 0.4 MB in "
        "float32), and its checkpoints leave 0.6 MB: export_weights would stop at a full disk "
        "after step 100; free 0.1 MB until then, or lower keep. The training is not lost by it"
    )
    lora = adam.with_values(lora={"rank": 1})
    assert checkpoint_room.check_room(tmp_path, lora, sizes) == []
    monkeypatch.setattr(checkpoint_room, "is_same_disk", lambda *_: False)
    assert checkpoint_room.check_room(tmp_path, adam, sizes) == []


def test_a_restart_continues_where_the_training_would_have(tmp_path: Path, disk) -> None:
    """What would be removed before its time for the next save counts as free."""
    sizes = ModelSizes(2, 2, 1, "", 1, 1)
    adam = phase(optimizer="adamw", save_every=10, keep=3)
    save_steps(tmp_path, 10, 20, 30, size=24)
    disk.bytes = 3 * 24 + 10
    assert checkpoint_room.check_room(tmp_path, adam, sizes)
    with pytest.raises(PipelineError, match="are needed, since"):
        checkpoint_room.check_room(tmp_path, adam.with_values(keep_every=10), sizes)
    for step in (10, 20):
        shutil.rmtree(step_folder(tmp_path, step))
    disk.bytes = 24 + 23
    with pytest.raises(PipelineError, match="are needed, since"):
        checkpoint_room.check_room(tmp_path, adam, sizes)


def test_the_forecast_counts_what_stays(tmp_path: Path, disk) -> None:
    """One is written before one goes; those kept for good and the best come on top, and what is
    kept for good already gives no room back."""
    sizes = ModelSizes(2, 2, 1, "", 1, 1)
    adam = phase(optimizer="adamw", save_every=10, keep=2, keep_every=50)
    measured = adam.with_values(validation=SETTINGS)
    assert checkpoint_room.max_checkpoints(adam.with_values(keep_every=None), 0) == 3
    assert [checkpoint_room.max_checkpoints(adam, begun) for begun in (0, 50, 100)] == [5, 4, 3]
    assert checkpoint_room.max_checkpoints(measured, 0) == 6
    save_steps(tmp_path, 50, size=24)
    for chosen, more in ((adam, 4), (measured, 5)):
        # The last one is written while the oldest is still there: the export finds its room.
        disk.bytes = (1 + more) * 24 + 8
        assert checkpoint_room.check_room(tmp_path, chosen, sizes) == []
        disk.bytes -= 1
        assert checkpoint_room.check_room(tmp_path, chosen, sizes)


def test_a_disk_that_is_low_already_is_refused(tmp_path: Path, disk) -> None:
    """Each start would train one step and write a whole checkpoint more onto it."""
    low = phase(optimizer="adamw", save_every=10, disk_low_threshold=100)
    checkpoint_room.check_low(tmp_path, low)
    disk.bytes = 99
    with pytest.raises(PipelineError, match="less than disk_low_threshold") as caught:
        checkpoint_room.check_low(tmp_path, low)
    assert "the same command continues from the phase's start" in caught.value.hint


def test_what_a_published_checkpoint_shares_gives_nothing_back(tmp_path: Path) -> None:
    """Its files have two names on the disk, and removing one frees none of them."""
    save_steps(tmp_path, 1, size=1000)
    folder = step_folder(tmp_path, 1)
    whole = progress_folder.freed_bytes(folder)
    assert whole > 1000
    (tmp_path / "published").hardlink_to(folder / "rank-00000-00000.safetensors")
    assert progress_folder.freed_bytes(folder) == whole - 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw", "use_ema": True},
        {"optimizer": "adafactor", "adam_beta1": None, "adam_beta2": None, "adam_epsilon": None},
    ],
    ids=lambda changes: changes["optimizer"],
)
def test_what_is_forecast_is_what_is_written(training, changes) -> None:
    """The figure before the start and that before each save, against the files."""
    training.run("a", "torch", 1, **changes)
    folder = training.rolling("a", 1)
    found = Checkpoint(folder)
    tensors = sum(
        t.nbytes for path in folder.glob("*.safetensors") for t in load_file(path).values()
    )
    optimizer, averaged = changes["optimizer"], "use_ema" in changes
    slots = [MASTER, *optimizers.slots(optimizer, {}), *([EMA_SLOT] if averaged else [])]
    assert {*found.slots} == {*slots}
    assert checkpoint_room.checkpoint_bytes(found.shapes, slots, optimizer) == tensors
    trained = sum(torch.Size(shape).numel() for shape in found.shapes.values())
    sizes = ModelSizes(trained, trained, 1, "", 1, 1)
    if averaged:  # a factored slot is no multiple of the parameters
        assert checkpoint_room.forecast(phase(**changes), sizes) == tensors


@pytest.mark.slow
def test_a_low_disk_stops_the_training_with_a_checkpoint(training, monkeypatch) -> None:
    """It ends as one that was asked to stop, and says why; with room it continues."""
    whole = training.run("plain", "torch", 6)
    training.phase("low", "torch", 6, disk_low_threshold=2**60)
    training.train_unfinished("low")
    assert saved_steps(training.progress("low")) == [1]
    left = json.loads((training.progress("low") / "exit.json").read_text())
    assert left["code"] == 85
    assert "less than disk_low_threshold" in training.output.read_text()
    assert left["reason"].startswith("the disk has less free than disk_low_threshold")
    training.phase("low", "torch", 6, disk_low_threshold=1)
    assert training.train("low") == whole
