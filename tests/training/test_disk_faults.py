"""Disks that are full, read-only or damaged: a sentence each, nothing lost, and it continues after.

The disks are small ones in memory, mounted for the test; a machine that does not let us mount them
skips these tests.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from pathlib import Path
from typing import IO, Any

import pytest
from tests.builders.refusals import refusal, refused
from tests.conftest import Mount
from tests.training.saving_trials import Engine, made, values

from zerotrain.errors import PipelineError
from zerotrain.state.position import StepCounter
from zerotrain.training.checkpointing import checkpoint_room, saving
from zerotrain.training.checkpointing.progress_folder import newest_intact, saved_steps, step_folder

TENSORS = "rank-00000-00000.safetensors"


def fill(path: Path) -> None:
    """Write into a file until the disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)


def test_a_disk_that_fills_while_a_checkpoint_is_written(
    tmp_path: Path,
    mount: Mount,
    gate,
) -> None:
    """Another program takes the last bytes: one sentence, and what was there stays."""
    progress = tmp_path / "disk"
    mount(progress, "size=256k")
    engine = Engine()
    with made(engine, progress) as saved:
        gate.release(3)
        saved.begin(StepCounter(1, 4, 100), wait=True)
        saved.begin(StepCounter(2, 8, 100))
        fill(progress / "other")
        gate.release(3)
        error = refused(saved.finish)
        assert "the disk is full: the checkpoint of step 2 was not written" in str(error)
        assert "continues from step 1" in error.hint
        assert saved_steps(progress) == [1]
        assert list(progress.glob(".step-*")) == []
        (progress / "other").unlink()
        engine.step()
        gate.release(3)
        saved.begin(StepCounter(3, 12, 100), wait=True)
    assert values(progress, 1)["a"] == 0.0
    assert values(progress, 3)["a"] == 1.0


def test_a_disk_without_room_for_the_log(tmp_path: Path, mount: Mount, monkeypatch) -> None:
    """A disk that is full when the save begins, whatever its figures say: the same sentence."""
    progress = tmp_path / "disk"
    mount(progress, "size=64k,nr_inodes=2")
    monkeypatch.setattr(saving, "make_room", lambda *_: [])
    with made(Engine(), progress) as saved, pytest.raises(PipelineError) as caught:
        saved.begin(StepCounter(1, 4, 100))
    assert "the disk is full: the checkpoint of step 1 was not written" in str(caught.value)
    assert "continues from the phase's start" in caught.value.hint


def test_a_disk_that_turns_read_only(tmp_path: Path, mount: Mount) -> None:
    """As Linux does after an error of the disk: the next save says so, and the last one serves."""
    progress = tmp_path / "disk"
    mount(progress, "size=1m")
    with made(Engine(), progress) as saved:
        saved.begin(StepCounter(1, 4, 100), wait=True)
        mount(progress, "ro")
        text = refusal(saved.begin, StepCounter(2, 8, 100))
        assert "the checkpoint of step 2 cannot be written: Read-only file system" in text
    assert newest_intact(progress, 100) == step_folder(progress, 1)


def test_a_read_only_folder_is_refused_before_the_start(training, mount: Mount) -> None:
    """No process is launched for a phase that could save nothing."""
    training.phase("a", "torch", 4)
    mount(training.progress("a"), "size=1m")
    mount(training.progress("a"), "ro")
    text = refusal(training.call_stage, "a")
    assert "checkpoints cannot be written here: Read-only file system" in text


def test_a_failing_disk_is_named(tmp_path: Path, monkeypatch) -> None:
    """An error of the writing thread's that is neither of these has the system's words."""

    def failing(*_: object) -> dict[str, str]:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr("zerotrain.training.checkpointing.rank_writer.write_rank_files", failing)
    with made(Engine(), tmp_path / "p") as saved, pytest.raises(PipelineError) as caught:
        saved.begin(StepCounter(1, 4, 100), wait=True)
    assert "the checkpoint of step 1 cannot be written: Input/output error" in str(caught.value)
    assert "`dmesg`" in caught.value.hint
    assert list((tmp_path / "p").iterdir()) == []


def cut_off(folder: Path) -> None:
    path = folder / TENSORS
    path.write_bytes(path.read_bytes()[:-1])


def turn_a_bit(folder: Path) -> None:
    found = bytearray((folder / TENSORS).read_bytes())
    found[-1] ^= 1
    (folder / TENSORS).write_bytes(found)


def lose_a_file(folder: Path) -> None:
    (folder / TENSORS).unlink()


def cut_off_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:50])


def empty_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("")


def lose_an_entry(folder: Path) -> None:
    path = folder / "manifest.json"
    found = json.loads(path.read_text())
    del found["files"]
    path.write_text(json.dumps(found))


def lose_the_position(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("{}")


def gain_a_file(folder: Path) -> None:
    (folder / "rank-00001-00000.safetensors").touch()


DAMAGES = [
    *(cut_off, turn_a_bit, lose_a_file, cut_off_the_manifest, empty_the_manifest, lose_an_entry),
    *(lose_the_position, gain_a_file),
]


def saved_twice(folder: Path) -> Path:
    """A progress folder with checkpoints of the steps 1 and 2."""
    with made(Engine(), folder) as saved:
        for step in (1, 2):
            saved.begin(StepCounter(step, step, 100), wait=True)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage, capsys) -> None:
    """It is set aside, so that it is neither counted among those that are kept, nor removed."""
    progress = saved_twice(tmp_path / "p")
    damage(step_folder(progress, 2))
    assert newest_intact(progress, 100) == step_folder(progress, 1)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(str(step_folder(progress, 2)))
    assert said.endswith(
        "the checkpoint before it is taken and this one set aside as damaged-step-00000002"
    )
    assert saved_steps(progress) == [1]
    assert (progress / "damaged-step-00000002").is_dir()


def test_a_disk_that_cannot_read_a_checkpoint(tmp_path: Path, monkeypatch, capsys) -> None:
    """An error of the disk is no traceback; the one before is taken."""
    progress = saved_twice(tmp_path / "p")
    plain = hashlib.file_digest

    def failing(stream: IO[bytes], name: str) -> Any:
        if Path(stream.name) == step_folder(progress, 2) / TENSORS:
            raise OSError(errno.EIO, "Input/output error")
        return plain(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", failing)
    assert newest_intact(progress, 100) == step_folder(progress, 1)
    assert "cannot be read (Input/output error)" in capsys.readouterr().err


def test_a_phase_whose_checkpoints_are_all_damaged_does_not_restart(tmp_path: Path) -> None:
    """It is refused as often as it is started, each damage is named, and nothing is touched."""
    progress = saved_twice(tmp_path / "p")
    for step in (1, 2):
        cut_off(step_folder(progress, step))
    for _ in range(2):
        error = refused(newest_intact, progress, 4)
        assert "no checkpoint is whole" in str(error)
        for step in (1, 2):
            assert str(step_folder(progress, step) / TENSORS) in str(error)
        assert f"move {progress} away" in error.hint
    assert saved_steps(progress) == [1, 2]


def test_the_sentences_of_a_disk(tmp_path: Path) -> None:
    """A quota is a full disk; what has no number has its own words."""
    full = checkpoint_room.write_error(tmp_path, 7, OSError(errno.EDQUOT, "Quota exceeded"))
    assert full.what == f"{tmp_path}: the disk is full: the checkpoint of step 7 was not written"
    other = checkpoint_room.write_error(tmp_path, 7, OSError("odd"))
    assert other.what.endswith("the checkpoint of step 7 cannot be written: odd")
