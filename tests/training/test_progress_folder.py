"""What is in a phase's progress is kept, set aside or taken back, and never lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.training import progress_folder
from zerotrain.training.lock import take
from zerotrain.training.progress_folder import (
    accept,
    newest_step,
    prune,
    saved_steps,
    settle,
    step_folder,
)

FIRST = {"learning_rate": 1e-3, "code": "abc", "start": None}
OTHER = {"learning_rate": 1e-4, "code": "abc", "start": None}


def save(progress: Path, *steps: int, text: str = "") -> None:
    """Publish rolling checkpoints."""
    for step in steps:
        with artifact.publish(step_folder(progress, step), "checkpoint") as draft:
            (draft.folder / "rank-00000-00000.safetensors").write_text(f"{text} {step}")


@pytest.fixture
def progress(tmp_path: Path) -> Path:
    """The folder of a phase's progress; settle makes it."""
    return tmp_path / "results" / "run" / "plain" / "progress"


def aside(progress: Path) -> list[Path]:
    """The folders that were set aside."""
    return sorted(progress.parent.glob("progress.stale-*"))


def test_newest_step_is_the_newest_complete_one(progress: Path) -> None:
    """Not beyond the end of the phase; drafts and folders without a manifest do not count."""
    assert newest_step(progress, 1000) is None
    save(progress, 100, 90, 200)
    (progress / "step-00000300").mkdir()
    (progress / f".step-00000250.new-{os.getpid()}").mkdir()
    assert saved_steps(progress) == [90, 100, 200]
    assert newest_step(progress, 1000) == newest_step(progress, 200) == 200
    assert newest_step(progress, 199) == 100
    assert newest_step(progress, 89) is None


def test_prune_keeps_the_newest(progress: Path) -> None:
    """As many as asked for; the others' files are gone."""
    save(progress, 1, 2, 3, 4)
    prune(progress, 2, 4)
    assert saved_steps(progress) == [3, 4]
    assert sorted(path.name for path in progress.iterdir()) == ["step-00000003", "step-00000004"]
    prune(progress, 2, 4)
    assert saved_steps(progress) == [3, 4]


def test_prune_keeps_what_was_just_saved(progress: Path) -> None:
    """Where `until` was lowered, later checkpoints push out neither the present one nor each
    other: they serve when it is raised again."""
    save(progress, 300, 400, 10, 20)
    prune(progress, 1, 20)
    assert saved_steps(progress) == [20, 300, 400]


def test_prune_cut_short_leaves_no_half_checkpoint(progress: Path, monkeypatch) -> None:
    """What is being removed counts no more from the first moment; the next start clears it."""
    settle(progress, FIRST)
    save(progress, 1, 2)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress_folder.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(progress, 1, 2)
    assert saved_steps(progress) == [2]
    assert step_folder(progress, 1).exists()
    settle(progress, FIRST)
    assert not step_folder(progress, 1).exists()


def test_settle_clears_a_dead_writers_draft(progress: Path) -> None:
    """A checkpoint that was being written at a kill takes no room for ever."""
    child = subprocess.Popen(["true"])
    child.wait()
    settle(progress, FIRST)
    draft = progress / f".step-00000007.new-{child.pid}"
    draft.mkdir()
    (draft / "rank-00000-00000.safetensors").write_text("half")
    settle(progress, FIRST)
    assert not draft.exists()


def test_equal_fingerprint_keeps_everything(progress: Path) -> None:
    """A second start goes on where the first stopped."""
    assert settle(progress, FIRST) is None
    save(progress, 100)
    (progress / "metrics.jsonl").write_text("log")
    assert settle(progress, dict(FIRST)) is None
    assert saved_steps(progress) == [100]
    assert (progress / "metrics.jsonl").read_text() == "log"
    assert not aside(progress)


def test_other_fingerprint_sets_everything_aside(progress: Path) -> None:
    """The keys that differ are named, and the command that takes it back; nothing is removed."""
    settle(progress, FIRST)
    save(progress, 100, text="first")
    (progress / "metrics.jsonl").write_text("log")
    (progress / "tensorboard").mkdir()
    held = take(progress)
    said = settle(progress, {**OTHER, "snr_gamma": 5.0})
    assert said is not None
    (stale,) = aside(progress)
    assert str(stale) in said
    assert "(differs in: learning_rate, snr_gamma); training starts afresh" in said
    assert f"`zerotrain progress accept {progress.parent}` takes it back" in said
    assert saved_steps(progress) == []
    held.release()  # the lock stays where the training is
    assert {path.name for path in stale.iterdir()} == {
        "fingerprint.json",
        "step-00000100",
        "tensorboard",
        "metrics.jsonl",
    }
    kept = artifact.read(step_folder(stale, 100), "checkpoint")
    assert kept.path("rank-00000-00000.safetensors").read_text() == "first 100"
    assert json.loads((progress / "fingerprint.json").read_text())["snr_gamma"] == 5.0


def test_progress_without_a_fingerprint_is_set_aside(progress: Path) -> None:
    """Of what is not known it cannot be said that it goes with anything."""
    save(progress, 100)
    assert "differs in: code, learning_rate, start" in (settle(progress, FIRST) or "")


def test_a_key_that_is_gone_is_named(progress: Path) -> None:
    """Also where its value said that there is nothing."""
    settle(progress, FIRST)
    save(progress, 100)
    without = {key: value for key, value in FIRST.items() if key != "start"}
    assert "differs in: start)" in (settle(progress, without) or "")


def test_nothing_saved_is_nothing_to_set_aside(progress: Path) -> None:
    """A training that never saved leaves no folder behind."""
    settle(progress, FIRST)
    assert settle(progress, OTHER) is None
    assert not aside(progress)


def test_several_are_set_aside_side_by_side(progress: Path) -> None:
    """Going back and forth overwrites none of them."""
    for fingerprint in (FIRST, OTHER, FIRST, OTHER):
        settle(progress, fingerprint)
        save(progress, 100)
    assert len(aside(progress)) == 3
    assert all(saved_steps(folder) == [100] for folder in aside(progress))


def test_accept_takes_back_what_was_set_aside_last(progress: Path) -> None:
    """What was there meanwhile is set aside in its place, and a next start keeps what was taken."""
    settle(progress, FIRST)
    save(progress, 100, text="first")
    settle(progress, OTHER)
    save(progress, 7, text="other")
    (set_aside,) = aside(progress)
    said = accept(progress.parent)
    (kept,) = aside(progress)
    assert said == (
        f"{progress}: taken back from {set_aside.name}, goes on from step 100; what was there is "
        f"kept as {kept}"
    )
    assert saved_steps(kept) == [7]
    assert settle(progress, OTHER) is None
    assert saved_steps(progress) == [100]
    assert json.loads((progress / "fingerprint.json").read_text()) == OTHER
    assert "training starts afresh" in (settle(progress, FIRST) or "")


def test_a_full_disk_leaves_the_fingerprint_whole(progress: Path, monkeypatch) -> None:
    """Each start writes it: half a fingerprint would end every later start. What was to be taken
    back stays where it is, and the same call takes it back once there is room."""
    plain = Path.write_text

    def fill_up(path: Path, text: str, *rest: object, **options: object) -> int:
        if "fingerprint" not in path.name:
            return plain(path, text, *rest, **options)  # type: ignore[arg-type]
        plain(path, text[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settle(progress, FIRST)
    save(progress, 100)
    for act in (
        lambda: settle(progress, FIRST),
        lambda: settle(progress, OTHER),
        lambda: accept(progress.parent),
    ):
        monkeypatch.setattr(Path, "write_text", fill_up)
        with pytest.raises(PipelineError, match=r"fingerprint\.json: cannot be written: No space"):
            act()
        monkeypatch.undo()
    (stale,) = aside(progress)
    assert saved_steps(stale) == [100]
    assert json.loads((stale / "fingerprint.json").read_text()) == FIRST
    assert settle(progress, OTHER) is None
    assert accept(progress.parent).endswith("goes on from step 100")
    assert settle(progress, OTHER) is None
    assert saved_steps(progress) == [100]


def test_accept_into_an_empty_progress(progress: Path) -> None:
    """The usual case: the start that set it aside was stopped before it saved."""
    settle(progress, FIRST)
    save(progress, 100)
    settle(progress, OTHER)
    (progress / "metrics.jsonl").write_text("one line")
    said = accept(progress.parent)
    assert said.endswith("goes on from step 100")
    assert aside(progress) == []
    assert saved_steps(progress) == [100]
    assert not (progress / "lock").exists()


def test_accept_with_nothing_set_aside_is_refused(progress: Path) -> None:
    """A mistyped phase is answered, and nothing is made for it."""
    with pytest.raises(PipelineError) as caught:
        accept(progress.parent)
    assert f"{progress.parent}: no progress was set aside" in str(caught.value)
    assert "name the folder of a phase, results/RUN/PHASE" in str(caught.value)
    assert not progress.parent.exists()


def test_accept_during_a_training_is_refused(progress: Path) -> None:
    """Nobody moves checkpoints away from under a training."""
    settle(progress, FIRST)
    save(progress, 100)
    settle(progress, OTHER)
    held = take(progress)
    with pytest.raises(PipelineError, match="a training is running here already"):
        accept(progress.parent)
    assert len(aside(progress)) == 1
    held.release()
