"""The lock of a Snakemake that was killed: removed where none works here that could hold it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.builders.processes import DEAD_PID

from zerotrain.pipeline import snakemake_runs
from zerotrain.pipeline.snakemake_runs import LOCKS, RUNS, Run
from zerotrain.training.process.lock_owner import LockOwner, this_process

GONE = dataclasses.replace(this_process(), pid=DEAD_PID, started=1.0)
AWAY = dataclasses.replace(this_process(), host="other-host", pid=1, started=1.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project whose lock is held by somebody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(snakemake_runs.atexit, "register", lambda *_: None)
    LOCKS.mkdir(parents=True)
    RUNS.mkdir()
    (LOCKS / "0.input.lock").write_text("a\n")
    (LOCKS / "0.output.lock").write_text("b\n")


def record(process: LockOwner, *, local: bool = True, supervisor: int = 0) -> Path:
    """The record of a Snakemake."""
    run = Run(RUNS / f"{process.host}-{process.pid}.json", process, local, supervisor)
    run.write()
    return run.file


def locks() -> list[str]:
    """The locks that are left."""
    return sorted(path.name for path in LOCKS.iterdir())


BOTH = ["0.input.lock", "0.output.lock"]


def test_the_lock_of_a_killed_snakemake_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that says whose it was; the record that is left is that of this one."""
    dead = record(GONE)
    snakemake_runs.begin(["--cores", "all", "train"])
    assert locks() == []
    assert not dead.exists()
    assert [run.process for run in snakemake_runs.read_runs()] == [this_process()]
    assert capsys.readouterr().err == (
        f".snakemake/locks: unlocked: the snakemake that held it was killed (pid {GONE.pid} on "
        f"{GONE.host}{GONE.details})\n"
    )


def test_the_lock_of_one_that_lives_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever else was killed; who works here is named, and no hint leads to an unlock."""
    started = psutil.Process(os.getppid()).create_time()
    parent = dataclasses.replace(this_process(), pid=os.getppid(), started=started)
    kept = [record(GONE), record(parent)]
    snakemake_runs.begin([])
    assert locks() == BOTH
    assert all(path.exists() for path in kept)
    said = capsys.readouterr().err
    assert f"not unlocked: snakemake pid {GONE.pid} on" in said
    assert f"snakemake pid {parent.pid} on" in said
    assert "works here: wait until it has ended" in said


def test_a_clock_that_was_set_ends_no_snakemake() -> None:
    """Its start looks like another's then; the lock on its record lives as long as it does."""
    moved = record(dataclasses.replace(this_process(), pid=os.getppid(), started=1.0))
    (run,) = snakemake_runs.read_runs()
    assert not run.is_live()
    run.hold()
    assert run.is_live()
    snakemake_runs.begin([])
    assert locks() == BOTH
    assert moved.exists()


def test_pid_of_another_container_says_nothing() -> None:
    """The lock on its record does: the kernel is the same."""
    twin = dataclasses.replace(this_process(), pid_namespace=this_process().pid_namespace + 1)
    record(dataclasses.replace(twin, pid=DEAD_PID))
    (run,) = snakemake_runs.read_runs()
    assert not run.is_live()
    run.hold()
    assert run.is_live()


def test_the_lock_of_another_host_stays_and_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is known of its processes."""
    file = record(AWAY)
    record(GONE)
    snakemake_runs.begin([])
    assert locks() == BOTH
    assert capsys.readouterr().err == (
        f".snakemake/locks: not unlocked: snakemake pid 1 on other-host{AWAY.details} counts as "
        f"running; if that host is gone for good, remove {file}\n"
    )


def test_the_lock_of_one_whose_jobs_are_in_a_cluster_stays(capsys) -> None:
    """They live on without it, and a second of each would write what they write."""
    record(GONE, local=False)
    snakemake_runs.begin([])
    assert locks() == BOTH
    said = capsys.readouterr().err
    assert "was killed, and its jobs may run on in the cluster: wait for them or end them" in said
    assert "`snakemake --unlock`" in said


def test_a_lock_without_a_record_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """As that of a version without records."""
    snakemake_runs.begin([])
    assert locks() == BOTH
    assert capsys.readouterr().err == ""


def test_without_a_lock_the_records_of_killed_ones_go() -> None:
    """Silently; a record that is not whole is none."""
    for name in BOTH:
        (LOCKS / name).unlink()
    dead = record(GONE)
    (RUNS / "torn.json").write_text('{"process"')
    snakemake_runs.begin([])
    assert not dead.exists()
    assert [run.process for run in snakemake_runs.read_runs()] == [this_process()]


@pytest.mark.parametrize("words", [["-n"], ["--dry-run", "train"], ["--dryrun"], ["-np"]])
def test_a_dry_run_changes_nothing(words: list[str]) -> None:
    """It locks nothing, and is in no one's way."""
    dead = record(GONE)
    snakemake_runs.begin(["--cores", "1", *words])
    assert locks() == BOTH
    assert [run.file for run in snakemake_runs.read_runs()] == [dead]


def test_other_words_are_no_dry_run() -> None:
    """Whatever letters they have."""
    words = ["--nolock", "-j4", "n", "-junlimited", "-Rtrain", "-qnone"]
    assert not snakemake_runs.is_dry_run(words)


def test_where_the_jobs_run_is_noted() -> None:
    """Once the executor is known."""
    snakemake_runs.begin([])
    assert [run.local for run in snakemake_runs.read_runs()] == [True]
    snakemake_runs.note_executor(local=False)
    assert [run.local for run in snakemake_runs.read_runs()] == [False]


def test_a_snakemake_whose_command_was_killed_is_waited_for(monkeypatch) -> None:
    """It ends by itself, when it notices."""
    script = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        started = psutil.Process(child.pid).create_time()
        process = dataclasses.replace(this_process(), pid=child.pid, started=started)
        record(process, supervisor=GONE.pid)
        looks = []

        def look(seconds: float) -> None:
            looks.append(seconds)
            child.kill()
            child.wait()

        monkeypatch.setattr(snakemake_runs.time, "sleep", look)
        snakemake_runs.wait_for_orphans()
    assert looks == [0.1]
