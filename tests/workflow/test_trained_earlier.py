"""What another version trained is reported, and stays."""

from __future__ import annotations

import shutil

from tests.workflow.jobs import EVERYTHING, NOTHING, raised

LINE = "2 phases were trained by another version of train_phase than {} and stay as they are"


def test_a_raised_version_of_the_training_is_reported_and_trains_nothing(built):
    """In one line of each plan; the phase whose folders are moved away is trained again."""
    assert "another version" not in built.snakemake("-n", "train").stdout
    raised("train_phase")(built)
    said = built.snakemake("-n", "train").stdout
    assert said.count(LINE.format(2)) == 1
    assert built.planned("train") == NOTHING
    for name in ("checkpoint", "progress"):
        shutil.move(built.folder / "results/tiny/offload" / name, built.folder / name)
    trained = ("train_phase", "export_weights", "evaluate", "report")
    assert built.planned("train") == {stage: min(EVERYTHING[stage], 1) for stage in trained}


def test_a_checkpoint_without_a_readable_record_is_reported(built):
    """One whose record is gone, and one whose record is cut short."""
    for name, content in (("plain", None), ("offload", "{")):
        record = built.folder / "results/tiny" / name / "checkpoint/records/made_by.json"
        record.unlink() if content is None else record.write_text(content)
    assert LINE.format(1) in built.snakemake("-n", "train").stdout
