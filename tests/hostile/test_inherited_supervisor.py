"""ZEROTRAIN_SUPERVISOR in a copied environment ends nobody's processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.builders.processes import DEAD_PID

from zerotrain.machine import child_process
from zerotrain.machine.child_process import (
    SUPERVISOR,
    end_with_parent,
    end_with_supervisor,
    supervisor_mark,
    supervisor_pid,
)

WORKS = """
import time
from zerotrain.machine.child_process import end_with_parent
end_with_parent()
time.sleep(0.7)  # the watch looks every half second
print("done")
"""


def environment(mark: str, **others: str) -> dict[str, str]:
    """Of a process that inherits a mark."""
    return {**os.environ, SUPERVISOR: mark, **others}


def test_the_mark_of_others_supervises_nobody() -> None:
    """`sbatch --export=ALL` takes it to another machine or into a job; or it names no process."""
    _, start, job, space = supervisor_mark().split(":")
    other = [f"{DEAD_PID}:{start}:{job}:{space}_2", f"{DEAD_PID}:{start}:{job}7:{space}"]
    command = [sys.executable, "-c", WORKS]
    for running in [
        subprocess.Popen(command, env=environment(mark), stdout=-1, stderr=-1, text=True)
        for mark in (*other, "a name", "")
    ]:
        assert (*running.communicate(), running.returncode) == ("done\n", "", 0)


def test_a_supervisor_that_has_ended_takes_only_its_own_along() -> None:
    """A shell that inherited it lives on, and is told what to do; so is one whose pid is another
    process's now."""
    pid, start, job, space = supervisor_mark().split(":")
    for mark in (f"{DEAD_PID}:{start}:{job}:{space}", f"{pid}:{int(start) - 1}:{job}:{space}"):
        done = subprocess.run(
            ["sh", "-c", '"$0" -c "$1"; echo "code $?"', sys.executable, WORKS],
            env=environment(mark), capture_output=True, text=True, start_new_session=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "code 2\n")
        assert f"pid {mark.partition(':')[0]}, has ended" in done.stderr
        assert f"`unset {SUPERVISOR}`" in done.stderr


def test_a_child_knows_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own mark names this process, within the same job."""
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv(SUPERVISOR, supervisor_mark())
    assert supervisor_pid() == os.getpid()
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert supervisor_pid() == 0
    monkeypatch.setattr("threading.Thread.start", lambda self: pytest.fail("a thread was started"))
    end_with_parent()


def test_the_jobs_of_a_snakemake_inherit_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one that called it, with which it ends, nor that of another command."""
    followed: list[str] = []
    monkeypatch.setattr(child_process, "end_with_parent", lambda: followed.append(SUPERVISOR))
    for mark in (supervisor_mark(), f"{os.getppid()}"):
        monkeypatch.setenv(SUPERVISOR, mark)
        end_with_supervisor()
        assert SUPERVISOR not in os.environ
    assert followed == [SUPERVISOR]
