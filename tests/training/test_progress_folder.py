"""Rolling checkpoints: the newest, those that stay, and what a kill leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.builders.processes import DEAD_PID
from tests.builders.states import make_position, save_steps

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.state.checkpoint import write_position
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.checkpointing.conditions import manifest_content
from zerotrain.training.checkpointing.progress_folder import (
    clear_leftovers,
    newest_intact,
    newest_step,
    prune,
    saved_steps,
    step_folder,
)
from zerotrain.training.reporting.validation_history import BEST, FINISHED, best_step, finished_step


@pytest.fixture
def progress(tmp_path: Path) -> Path:
    """The folder of a phase's progress."""
    return tmp_path / "results" / "run" / "plain" / "progress"


def aside(progress: Path) -> list[Path]:
    """The folders that were set aside."""
    return sorted(progress.parent.glob("progress.stale-*"))


def test_newest_step_is_the_newest_complete_one(progress: Path) -> None:
    """Not beyond the end of the phase; drafts and folders without a manifest do not count."""
    assert newest_step(progress, 1000) is None
    save_steps(progress, 100, 90, 200)
    (progress / "step-00000300").mkdir()
    (progress / f".step-00000250.new-{os.getpid()}").mkdir()
    assert saved_steps(progress) == [90, 100, 200]
    assert newest_step(progress, 1000) == newest_step(progress, 200) == 200
    assert newest_step(progress, 199) == 100
    assert newest_step(progress, 89) is None


def test_prune_keeps_the_newest(progress: Path) -> None:
    """As many as asked for; the others' files are gone."""
    save_steps(progress, 1, 2, 3, 4)
    prune(progress, 2, 4)
    assert saved_steps(progress) == [3, 4]
    assert sorted(path.name for path in progress.iterdir()) == ["step-00000003", "step-00000004"]
    prune(progress, 2, 4)
    assert saved_steps(progress) == [3, 4]


def test_prune_keeps_what_was_just_saved(progress: Path) -> None:
    """Where `until` was lowered, later checkpoints push out neither the present one nor each
    other: they serve when it is raised again."""
    save_steps(progress, 300, 400, 10, 20)
    prune(progress, 1, 20)
    assert saved_steps(progress) == [20, 300, 400]


def test_prune_cut_short_leaves_no_half_checkpoint(progress: Path, monkeypatch) -> None:
    """What is being removed counts no more from the first moment; the next start clears it."""
    save_steps(progress, 1, 2)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress_folder.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(progress, 1, 2)
    assert saved_steps(progress) == [2]
    assert len(list(progress.iterdir())) == 2
    assert clear_leftovers(progress) == []
    assert list(progress.iterdir()) == [step_folder(progress, 2)]


def save_with_records(progress: Path, *steps: int) -> None:
    """Publish checkpoints that have a position and the records of a training."""
    log = ""
    for step in steps:
        log += f'{{"step": {step}}}\n'
        with artifact.publish(step_folder(progress, step), "checkpoint") as draft:
            write_position(draft.folder, make_position(1), {}, [], [])
            draft.content = manifest_content({})
            (draft.folder / "records").mkdir()
            for name, text in (("metrics.jsonl", log), ("pending.json", "{}\n")):
                (draft.folder / "records" / name).write_text(text)
    (progress / "metrics.jsonl").write_text(log + '{"step": 1')


def test_damaged_records_cost_no_step(progress: Path, capsys) -> None:
    """A log is restored from the one that has grown from it, anything else removed."""
    save_with_records(progress, 1, 2)
    newest = step_folder(progress, 2)
    log = newest / "records/metrics.jsonl"
    before = log.read_bytes()
    log.write_bytes(b"torn")
    (newest / "records/pending.json").write_text("")
    assert newest_intact(progress, 9) == newest
    assert capsys.readouterr().err == (
        f"{log}: damaged, restored from {progress}/metrics.jsonl\n"
        f"{newest}/records/pending.json: damaged, removed; the next line of the log averages the "
        "steps after this one\n"
    )
    assert log.read_bytes() == before
    assert "records/pending.json" not in artifact.read(newest, "checkpoint").files
    assert newest_intact(progress, 9) == newest
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"step": "six"}', '{"step": 3'])
def test_a_damaged_note_of_a_step_says_nothing(progress: Path, text: str) -> None:
    """best.json and finished.json follow from the records of checkpoints, which stay."""
    progress.mkdir(parents=True)
    for name in (BEST, FINISHED):
        (progress / name).write_text(text)
    assert best_step(progress) is None
    assert finished_step(progress, {}, 9) is None


def test_start_clears_a_dead_writers_draft(progress: Path) -> None:
    """A checkpoint that was being written at a kill takes no room for ever."""
    draft = progress / f".step-00000007.new-{DEAD_PID}"
    draft.mkdir(parents=True)
    (draft / "rank-00000-00000.safetensors").write_text("half")
    clear_leftovers(progress)
    assert not draft.exists()


def test_a_checkpoint_without_its_manifest_is_set_aside(progress: Path) -> None:
    """It is no leftover of a removal; where it is the only one, nothing restarts in silence."""
    save_steps(progress, 1, 2)
    (step_folder(progress, 2) / "manifest.json").unlink()
    assert clear_leftovers(progress) == [
        f"{step_folder(progress, 2)}: its manifest.json is missing; another checkpoint is taken "
        "and this one set aside as damaged-step-00000002"
    ]
    assert (progress / "damaged-step-00000002/rank-00000-00000.safetensors").is_file()
    (step_folder(progress, 1) / "manifest.json").unlink()
    with pytest.raises(PipelineError) as caught:
        clear_leftovers(progress)
    assert "manifest.json is missing, and there is no other checkpoint" in caught.value.what
    assert step_folder(progress, 1).is_dir()
