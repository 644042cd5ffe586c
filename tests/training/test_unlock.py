"""`zerotrain progress unlock`: for an owner that is gone and cannot be seen."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from zerotrain.cli.groups import unlock as command
from zerotrain.errors import PipelineError
from zerotrain.machine.processes import ProcessRecord, this_process
from zerotrain.training.process import lock, lock_file
from zerotrain.training.process.lock import read_owner
from zerotrain.training.process.progress_commands import unlock


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


def held(folder: Path, silent: float = 100, **changes: object) -> ProcessRecord:
    """Write the lock of an owner on another machine, with its last sign so many seconds ago."""
    found = replace(this_process(120), **{"host": "n1", "pid": 7, **changes})  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / lock.LOCK).write_text(json.dumps(asdict(found)))
    then = time.time() - silent
    os.utime(folder / lock.LOCK, (then, then))
    return found


@pytest.mark.parametrize(("answer", "left"), [("y\n", False), ("n\n", True), ("\n", True)])
def test_lock_is_removed_when_the_question_is_answered_so(
    tmp_path: Path, monkeypatch, capsys, answer: str, left: bool
) -> None:
    """Nothing is the same as no; the question names the owner and the age of its last sign."""
    owner = held(tmp_path)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    if left:
        with pytest.raises(PipelineError, match="the lock was left"):
            unlock(tmp_path, yes=False)
    else:
        assert unlock(tmp_path, yes=False).startswith(f"{tmp_path}: unlocked; it was held by pid 7")
    assert read_owner(tmp_path) == (owner if left else None)
    asked = capsys.readouterr().err
    assert f"held by pid 7 on n1{owner.details}, last sign of life 100 s ago" in asked
    assert asked.endswith("Remove its lock? [y/N] ")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "lock.taking") == (
        ["lock"] if left else []
    )


def test_without_a_terminal_only_yes_removes_a_lock(tmp_path: Path, monkeypatch) -> None:
    """A script does not answer by accident."""
    held(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(PipelineError, match="not removed without confirmation") as caught:
        unlock(tmp_path, yes=False)
    assert "--yes" in str(caught.value)
    assert read_owner(tmp_path) is not None
    unlock(tmp_path, yes=True)
    assert read_owner(tmp_path) is None
    assert "no lock to remove" in unlock(tmp_path, yes=True)


def test_holder_that_lives_is_not_unlocked(tmp_path: Path, monkeypatch) -> None:
    """By its pid here, or by the signs that it gives on another machine; not even with --yes."""
    owner = held(tmp_path, host=this_process().host, pid=os.getpid())
    with pytest.raises(PipelineError, match=f"its holder lives: pid {os.getpid()} on"):
        unlock(tmp_path, yes=True)
    assert read_owner(tmp_path) == owner
    monkeypatch.setattr(lock_file, "SIGN_SECONDS", 0.3)
    away = held(tmp_path, silent=0)
    sign = threading.Timer(0.2, os.utime, [tmp_path / lock.LOCK])
    sign.start()
    with pytest.raises(PipelineError, match="its holder lives: pid 7 on n1"):
        unlock(tmp_path, yes=True)
    assert read_owner(tmp_path) == away


def test_holder_that_has_ended_needs_no_unlocking(tmp_path: Path) -> None:
    """The next start takes it over."""
    held(tmp_path, host=this_process().host, pid=2**22 + 1)
    assert "the next start takes the lock over" in unlock(tmp_path, yes=False)


def test_lock_of_who_came_meanwhile_stays(tmp_path: Path, monkeypatch) -> None:
    """While the user thinks, another has taken over."""
    held(tmp_path)
    later: list[ProcessRecord] = []

    class Slow(Terminal):
        def readline(self, *arguments: object) -> str:
            later.append(held(tmp_path, silent=0, pid=8))
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Slow())
    with pytest.raises(PipelineError, match="another process has taken the lock since: pid 8"):
        unlock(tmp_path, yes=False)
    assert [read_owner(tmp_path)] == later


def test_command_takes_the_name_of_a_phase(tmp_path: Path, monkeypatch, capsys) -> None:
    """As the hint of a refusal has it."""
    monkeypatch.chdir(tmp_path)
    progress = Path("results/digits/plain/progress")
    owner = held(progress, lease=0.0)
    assert lock.unlock_hint(progress, owner).endswith("`zerotrain progress unlock digits/plain`")
    command("digits/plain", yes=True)
    assert read_owner(progress) is None
    assert "unlocked; it was held by pid 7 on n1" in capsys.readouterr().out
