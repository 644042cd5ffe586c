"""What an earlier version trained is reported and kept, and `zerotrain retrain` trains it again."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict

import pytest
from tests.workflow.jobs import EVERYTHING, NOTHING, source

from zerotrain.errors import EXIT_USER_ERROR
from zerotrain.training.process.lock_owner import this_process

RETRAINED = {
    stage: EVERYTHING[stage] for stage in ("train_phase", "export_weights", "evaluate", "report")
}
LINE = "2 phases were trained by an earlier version; `zerotrain retrain tiny` trains them again"


def retrain(project, *words):
    """Call it, in the project; its output, and what it refuses with its code."""
    done = project.command("python", "-m", "zerotrain", "retrain", *words)
    assert done.returncode in (0, EXIT_USER_ERROR), done.stdout
    assert "Traceback" not in done.stdout
    assert ("ERROR: " in done.stdout) == bool(done.returncode)
    return done.stdout


def contents(results):
    """The files of checkpoints and progress by their places; locks are none."""
    return {
        path: path.read_bytes()
        for path in results.rglob("*")
        if path.is_file() and {"checkpoint", "progress"} & {*path.parts} and "lock" not in path.name
    }


@pytest.mark.slow
def test_retrain_earlier_version_is_reported_and_trained_again_where_asked(built):
    """An edit of code that decides numbers plans nothing and is one line; retrain moves what was
    trained aside, names the way back, and the next run trains both phases."""
    assert "earlier version" not in built.snakemake("-n", "train").stdout
    refused = retrain(built, "tiny")
    assert "tiny: no phase was trained by an earlier version of the code" in refused
    source("training/loop.py")(built)
    said = built.snakemake("-n", "train").stdout
    assert said.count(LINE) == 1
    assert "Nothing to be done" in said
    results = built.folder / "results/tiny"
    before = contents(results)
    said = retrain(built, "tiny")
    assert built.planned("train") == RETRAINED
    restore = [line.partition("restore it: ")[2] for line in said.splitlines() if "restore" in line]
    assert len(restore) == 2
    assert "train again: snakemake --cores all train" in said
    for command in restore:
        subprocess.run(command, shell=True, check=True, cwd=built.folder)
    assert built.planned("train") == NOTHING
    assert contents(results) == before
    retrain(built, "tiny")
    built.build("train")
    assert "earlier version" not in built.snakemake("-n", "train").stdout


@pytest.mark.slow
def test_retrain_one_phase(built):
    """A phase that is named, whatever trained it; a phase that trains, and one that is none, are
    refused and left."""
    assert "tiny: it has no phase other" in retrain(built, "tiny", "--phase", "other")
    lock = built.folder / "results/tiny/offload/progress/lock"
    lock.write_text(json.dumps(asdict(this_process())))
    refused = retrain(built, "tiny", "--phase", "offload")
    assert f"a training is running here already: pid {os.getpid()}" in refused
    assert built.planned("train") == NOTHING
    lock.unlink()
    retrain(built, "tiny", "--phase", "offload")
    assert built.planned("train") == dict.fromkeys(RETRAINED, 1)
    assert "nothing is trained yet" in retrain(built, "tiny", "--phase", "offload")


def test_retrain_checkpoint_without_a_readable_record_is_reported(built):
    """One whose record is gone, and one whose record is cut short."""
    for name, content in (("plain", None), ("offload", "{")):
        record = built.folder / "results/tiny" / name / "checkpoint/records/made_by.json"
        record.unlink() if content is None else record.write_text(content)
    assert LINE in built.snakemake("-n", "train").stdout
