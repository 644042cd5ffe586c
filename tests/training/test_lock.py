"""One writer per progress folder."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.builders import refusals
from tests.builders.processes import DEAD_PID

from zerotrain.errors import PipelineError
from zerotrain.machine.disk_errors import DiskError
from zerotrain.machine.processes import ProcessRecord, this_process
from zerotrain.training.process import lock
from zerotrain.training.process.lock import hold_writer, read_owner, take

TAKERS, ROUNDS = 8, 20
SECONDS = 60
"""Longer than any of this takes."""

HOLD_WRITER = """
import pathlib, sys, time
from zerotrain.training.process.lock import hold_writer
stream = hold_writer(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


LAUNCHER = """
import pathlib, sys, time
from zerotrain.training.process.lock import end_with_owner
end_with_owner(pathlib.Path(sys.argv[1]))
print("looks", flush=True)
time.sleep(60)
"""


def held_by(folder: Path, **changes: Any) -> ProcessRecord:
    """Write a lock as another owner would have left it; by default of a running process, us."""
    pid = changes.get("pid", os.getpid())
    started = psutil.Process(pid).create_time() if psutil.pid_exists(pid) else 1.0
    values = {"host": socket.gethostname(), "pid": pid, "started": started, "job": "", "lease": 0.0}
    owner = replace(this_process(), **values | changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / lock.LOCK).write_text(json.dumps(asdict(owner)))
    return owner


def refusal(folder: Path) -> str:
    """The message with which the lock is refused."""
    return refusals.refusal(take, folder)


def test_lock_is_taken_and_given_back(tmp_path: Path) -> None:
    """The folder is made; the owner is written down; after the release no process holds it."""
    folder = tmp_path / "run" / "plain" / "progress"
    held = take(folder)
    owner = read_owner(folder)
    assert owner is not None
    assert (owner.host, owner.pid, owner.job) == (socket.gethostname(), os.getpid(), "")
    assert owner.is_running() is not False
    held.release()
    assert read_owner(folder) is None
    take(folder).release()


def test_second_start_is_refused_naming_the_holder(tmp_path: Path, sleeper, monkeypatch) -> None:
    """Pid, host, job and since when; how to stop it; and the lock stays the owner's."""
    owner = held_by(tmp_path, pid=sleeper.pid, job="4711")
    text = refusal(tmp_path)
    assert f"pid {sleeper.pid} on {socket.gethostname()}, job 4711, since 20" in text
    assert f"`touch {tmp_path}/stop`" in text
    assert read_owner(tmp_path) == owner
    assert not list(tmp_path.glob("lock.new-*"))


def test_dead_holder_is_taken_over(tmp_path: Path) -> None:
    """A killed training locks no one out."""
    held_by(tmp_path, pid=DEAD_PID)
    take(tmp_path)
    owner = read_owner(tmp_path)
    assert owner is not None
    assert owner.pid == os.getpid()


def test_holder_that_waits_to_be_reaped_is_dead(tmp_path: Path, sleeper) -> None:
    """A killed process whose parent does not look is still listed; it trains no more."""
    held_by(tmp_path, pid=sleeper.pid)
    assert "is running here already" in refusal(tmp_path)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(sleeper.pid).status() == psutil.STATUS_ZOMBIE
    take(tmp_path)


def test_another_process_of_the_same_pid_is_taken_over(tmp_path: Path, sleeper) -> None:
    """The pid runs, but what has it now started at another time than the owner."""
    started = psutil.Process(sleeper.pid).create_time()
    held_by(tmp_path, pid=sleeper.pid, started=started - 100)
    take(tmp_path)


def test_other_host_is_never_taken_over(tmp_path: Path) -> None:
    """Whether it lives cannot be seen from here: the message says what to do if not."""
    held_by(tmp_path, host="elsewhere", pid=1, started=0.0)
    text = refusal(tmp_path)
    assert "pid 1 on elsewhere" in text
    assert f"if it is gone for good: `zerotrain progress unlock {tmp_path}`" in text


def test_lock_that_a_power_cut_emptied_is_taken_over(tmp_path: Path) -> None:
    """It names no process, and a living owner's lock is always whole."""
    for text in ("", "[]", "{}"):
        (tmp_path / lock.LOCK).write_text(text)
        os.utime(tmp_path / lock.LOCK, (0, 0))
        take(tmp_path).release()


def test_lock_without_a_name_that_is_new_is_waited_for(tmp_path: Path, sleeper) -> None:
    """Without hard links a lock is empty for a moment: it is no reason to take it over."""
    place = tmp_path / lock.LOCK
    place.touch()
    filled = threading.Timer(0.3, lambda: held_by(tmp_path, pid=sleeper.pid))
    filled.start()
    assert f"pid {sleeper.pid} on" in refusal(tmp_path)
    filled.join()


def test_release_leaves_another_holders_lock(tmp_path: Path) -> None:
    """Whose lock a person removed does not remove the lock of the next one."""
    first = take(tmp_path)
    second = held_by(tmp_path, host="elsewhere")
    first.release()
    assert read_owner(tmp_path) == second


def link_fails(number: int) -> Any:
    """os.link as it fails with an error number."""

    def link(*arguments: object) -> None:
        raise OSError(number, os.strerror(number), str(arguments[0]))

    return link


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_file_systems_without_links_or_locks(tmp_path: Path, monkeypatch, number: int) -> None:
    """The lock is as good as the file system lets it be, and never a traceback."""
    monkeypatch.setattr(os, "link", link_fails(number))
    monkeypatch.setattr(fcntl, "flock", link_fails(errno.ENOLCK))
    take(tmp_path)
    assert "is running here already" in refusal(tmp_path)
    hold_writer(tmp_path).close()


def test_without_links_a_lock_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, sleeper, monkeypatch
) -> None:
    """Another takes the lock between the look and the taking; the file system knows no links."""

    def link(*arguments: object) -> None:
        if read_owner(tmp_path) is None:
            held_by(tmp_path, pid=sleeper.pid)
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert f"pid {sleeper.pid} on" in refusal(tmp_path)
    owner = read_owner(tmp_path)
    assert owner is not None
    assert owner.pid == sleeper.pid


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_other_errors_are_sentences_and_replace_no_lock(
    tmp_path: Path, sleeper, monkeypatch, number: int
) -> None:
    """A disk that fails is no reason to take a lock without asking."""

    def link(*arguments: object) -> None:
        held_by(tmp_path, pid=sleeper.pid)
        raise OSError(number, os.strerror(number), str(arguments[0]))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(DiskError) as caught:
        take(tmp_path)
    assert f"{tmp_path / 'lock'}: cannot be written: {os.strerror(number)}" in str(caught.value)
    owner = read_owner(tmp_path)
    assert owner is not None
    assert owner.pid == sleeper.pid
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "lock.taking"]


def test_link_that_succeeded_and_says_it_exists_is_a_lock_taken(
    tmp_path: Path, monkeypatch
) -> None:
    """A network's client repeats what it got no answer to: then its own link exists already."""
    link = os.link

    def twice(*arguments: Any) -> None:
        link(*arguments)
        link(*arguments)

    monkeypatch.setattr(os, "link", twice)
    take(tmp_path).release()
    assert read_owner(tmp_path) is None


def test_without_locks_a_later_takers_lock_is_not_removed(
    tmp_path: Path, sleeper, monkeypatch
) -> None:
    """While one looks at a dead owner, another takes over; the file system knows no flock."""

    def refuse(*arguments: object) -> None:
        raise OSError("not supported")

    runs = ProcessRecord.is_running

    def meanwhile(self: ProcessRecord) -> bool:
        monkeypatch.setattr(ProcessRecord, "is_running", runs)
        held_by(tmp_path, pid=sleeper.pid)
        return False

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(ProcessRecord, "is_running", meanwhile)
    held_by(tmp_path, host="elsewhere")
    assert f"pid {sleeper.pid} on" in refusal(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["lock", "lock.taking"]


def _take_often(folder: Path, barrier: Barrier, results: Any) -> None:
    for number in range(ROUNDS):
        place = folder / str(number)
        barrier.wait(SECONDS)
        try:
            take(place)
            results.put((number, "won"))
        except PipelineError as error:
            found = re.search(r"pid (\d+) on", error.what)
            results.put((number, int(found[1]) if found else str(error)))
        except BaseException as error:
            results.put((number, repr(error)))
        barrier.wait(SECONDS)  # the winner lives until all have tried


def test_of_many_takers_exactly_one_wins(tmp_path: Path, monkeypatch) -> None:
    """Eight processes at once on the lock of a dead owner: one wins, the others name it."""
    runs = ProcessRecord.is_running

    def slowly(self: ProcessRecord) -> bool | None:
        found = runs(self)
        time.sleep(random.Random(os.getpid() + time.monotonic_ns()).random() * 0.004)
        return found

    # Between looking at the lock and acting on it, others have time to act.
    monkeypatch.setattr(ProcessRecord, "is_running", slowly)
    for number in range(ROUNDS):
        held_by(tmp_path / str(number), pid=DEAD_PID)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(TAKERS), context.Queue()
    takers = [
        context.Process(target=_take_often, args=(tmp_path, barrier, results))
        for _ in range(TAKERS)
    ]
    for taker in takers:
        taker.start()
    found = [results.get(timeout=SECONDS) for _ in range(TAKERS * ROUNDS)]
    for taker in takers:
        taker.join(SECONDS)
    for number in range(ROUNDS):
        outcomes = [outcome for place, outcome in found if place == number]
        assert outcomes.count("won") == 1
        owner = read_owner(tmp_path / str(number))
        assert owner is not None
        assert {outcome for outcome in outcomes if outcome != "won"} == {owner.pid}


def test_writer_waits_for_the_one_before_then_refuses(tmp_path: Path, monkeypatch) -> None:
    """What a dead owner's training may still write ends first; if it does not, it is reported."""
    monkeypatch.setattr(lock, "GRACE_SECONDS", 0.3)
    first = hold_writer(tmp_path)
    with pytest.raises(PipelineError) as caught:
        hold_writer(tmp_path)
    assert f"{tmp_path}: a training process of an earlier start still runs" in str(caught.value)
    assert f"`fuser {tmp_path / 'lock.writer'}`" in str(caught.value)
    first.close()
    hold_writer(tmp_path).close()


def test_writer_continues_as_soon_as_the_one_before_ends(tmp_path: Path, monkeypatch) -> None:
    """A kill -9 ends the kernel's lock with its process."""
    command = [sys.executable, "-c", HOLD_WRITER, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"held\n"
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: (owner.kill(), owner.wait()))
    hold_writer(tmp_path).close()
    assert owner.returncode == -9
    owner.stdout.close()


@pytest.mark.slow
def test_the_lock_of_a_jobs_earlier_start_is_taken_over(tmp_path: Path, monkeypatch) -> None:
    """Slurm has ended it before it started the job again, on another node maybe; another step of
    the same start, or another job, is alive."""
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    take(tmp_path, seconds=3)
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    with pytest.raises(PipelineError, match=r"pid \d+ on n1, job 71"):
        take(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "72")
    with pytest.raises(PipelineError, match=r"pid \d+ on n1, job 71"):
        take(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    held = take(tmp_path)
    owner = read_owner(tmp_path)
    assert owner is not None
    assert owner.host == "n2"
    held.release()
    assert read_owner(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("what", ["released", "taken over", "its owner ends"])
def test_a_launcher_ends_with_the_lock_of_its_starter(tmp_path: Path, what: str, sleeper) -> None:
    """On another machine no signal of the starter's reaches it; of the owner's own machine it sees
    the process, too. While the starter holds the lock, it stays, even if it sees it late."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"looks\n"
    here = held_by(tmp_path, pid=sleeper.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(timeout=2.5 * lock.LOOK_SECONDS)
    if what == "released":
        (tmp_path / lock.LOCK).unlink()
    elif what == "taken over":
        held_by(tmp_path, pid=here.pid, job="72")
    else:
        sleeper.kill()
    assert launcher.wait(timeout=SECONDS) == -9
    launcher.stdout.close()
