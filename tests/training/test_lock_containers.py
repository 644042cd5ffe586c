"""One writer per progress folder, where several containers see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from zerotrain.config.launch import LaunchConfig
from zerotrain.errors import PipelineError
from zerotrain.machine import processes
from zerotrain.machine.processes import ProcessRecord, this_process
from zerotrain.training.process import lock, lock_file
from zerotrain.training.process.lock import read_owner, take

NAMESPACES = ["unshare", "--pid", "--mount", "--uts", "--fork", "--mount-proc", "--kill-child"]
NAMESPACES += [] if os.getuid() == 0 else ["--map-root-user"]
NAME = "trainer"
"""Host name of every container."""

TAKE = """
import sys, time
from pathlib import Path
from zerotrain.errors import PipelineError
from zerotrain.training.process.lock import take
try:
    take(Path(sys.argv[1]), seconds=float(sys.argv[2]))
except PipelineError as error:
    print(error, flush=True)
    sys.exit(2)
print("held", flush=True)
time.sleep(120)
"""

Start = Callable[[float], subprocess.Popen[str]]


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Start]:
    """Start containers that share a host name, each of which takes the lock of the folder."""
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"the kernel gives no namespaces here: {tried.stderr.strip()}")
    started = []

    def start(seconds: float) -> subprocess.Popen[str]:
        words = ["sh", "-c", f'hostname {NAME}; exec "$@"', "sh"]
        words += [sys.executable, "-c", TAKE, str(tmp_path), str(seconds)]
        process = subprocess.Popen([*NAMESPACES, *words], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    """What a container says of the lock."""
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.slow
def test_second_container_of_the_same_name_is_refused(tmp_path: Path, container: Start) -> None:
    """Both have the same host name and the same pid, which mean nothing to the other."""
    first = container(6)
    assert first_line(first) == "held\n"
    taken = read_owner(tmp_path)
    second = container(6)
    said = second.communicate(timeout=60)[0]
    assert second.returncode == 2
    assert f"a training is running here already: pid 1 on {NAME}, since 20" in said
    assert "in another container or on another machine of this name, last sign of life" in said
    assert f"`zerotrain progress unlock {tmp_path}`" in said
    assert read_owner(tmp_path) == taken
    assert first.poll() is None


@pytest.mark.slow
def test_dead_container_is_taken_over_after_its_lease(tmp_path: Path, container: Start) -> None:
    """No sooner than the lease after its last sign, by the file system's clock."""
    first = container(2)
    assert first_line(first) == "held\n"
    dead = read_owner(tmp_path)
    first.kill()
    first.wait()
    last = lock_file.last_sign(tmp_path / lock.LOCK)
    second = container(2)
    assert first_line(second) == "held\n"
    found = read_owner(tmp_path)
    assert dead is not None
    assert found is not None
    assert found.pid_namespace != dead.pid_namespace
    assert found.started != dead.started
    now = lock_file.last_sign(tmp_path / lock.LOCK)
    assert last is not None
    assert now is not None
    assert now - last >= dead.lease


def in_container(folder: Path, silent: float, **changes: object) -> ProcessRecord:
    """Write the lock of an owner in another PID namespace, with its last sign so long ago."""
    me = this_process(60)
    values = {"pid_namespace": me.pid_namespace + 1, **changes}
    found = replace(me, **values)  # type: ignore[arg-type]
    (folder / lock.LOCK).write_text(json.dumps(asdict(found)))
    then = time.time() - silent
    os.utime(folder / lock.LOCK, (then, then))
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs come often, so that they are soon missed."""
    monkeypatch.setattr(lock_file, "SIGN_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_clock_of_this_machine_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    """Ages are those of the file system, also where this machine's clock is an hour off."""
    now = time.time
    fresh, old = tmp_path / "fresh", tmp_path / "old"
    fresh.mkdir()
    old.mkdir()
    living, dead = in_container(fresh, 0), in_container(old, 61)
    monkeypatch.setattr(time, "time", lambda: now() + skew)
    assert lock.is_alive(fresh, living)
    assert not lock.is_alive(old, dead)
    take(old).release()


@pytest.mark.usefixtures("impatient")
def test_expired_holder_that_gives_a_sign_after_all_is_not_taken_over(tmp_path: Path) -> None:
    """A disk that did not answer for a while has kept its signs back."""
    found = in_container(tmp_path, 3600)
    signs = lock_file.SignsOfLife(tmp_path / lock.LOCK, found.lease)
    os.utime(tmp_path / lock.LOCK, (0, 0))
    try:
        with pytest.raises(PipelineError, match="in another container"):
            take(tmp_path)
    finally:
        signs.close()
    assert read_owner(tmp_path) == found


def test_signs_of_a_former_holder_do_not_count_for_the_next(tmp_path: Path) -> None:
    """It continues giving them through a file that is the lock no more."""
    found = in_container(tmp_path, 0)
    signs = lock_file.SignsOfLife(tmp_path / lock.LOCK, 0.1)
    (tmp_path / lock.LOCK).unlink()
    next_one = in_container(tmp_path, 3600, pid=found.pid + 1)
    time.sleep(0.2)
    signs.close()
    assert not lock.is_alive(tmp_path, next_one)


def test_holder_of_before_a_restart_of_the_machine_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has given no sign since the start; a machine of the same name would have."""
    monkeypatch.setattr(processes, "_uptime", lambda: 40.0)
    dead = in_container(tmp_path, 50, boot="another", pid_namespace=this_process().pid_namespace)
    assert not lock.is_alive(tmp_path, dead)
    take(tmp_path).release()
    twin = in_container(tmp_path, 30, boot="another", pid_namespace=this_process().pid_namespace)
    assert lock.is_alive(tmp_path, twin)


def test_a_lock_with_unknown_keys_is_read_and_one_that_lacks_keys_is_none(tmp_path: Path) -> None:
    """A later version may write more; what lacks a key is damaged."""
    me = asdict(this_process(60))
    (tmp_path / lock.LOCK).write_text(json.dumps({**me, "colour": "red"}))
    assert read_owner(tmp_path) == this_process(60)
    del me["boot"]
    (tmp_path / lock.LOCK).write_text(json.dumps(me))
    assert read_owner(tmp_path) is None


def test_lease_of_a_phase_is_the_default_of_the_lock() -> None:
    """A switch and a training hold their locks equally long."""
    assert LaunchConfig().lock_lease == lock_file.LEASE_SECONDS
