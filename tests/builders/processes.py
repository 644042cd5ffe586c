"""Wait for other processes, and run the ranks of a group, each in a fork."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from zerotrain.machine.ports import free_port
from zerotrain.run import processes

Job = Callable[..., Any]
DEAD_PID = 2**22 + 1
"""Of a process that has ended: no pid is so high."""


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_until(
    condition: Callable[[], Any], what: str = "", seconds: float = 90, pause: float = 0.01
) -> Any:
    """Wait for something that has to come true; its value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s: {what}"
        time.sleep(pause)
    return found


@contextmanager
def sleeping(program: str, *words: str, folder: Path = Path()) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this name in a folder, which sleeps until it is killed."""
    script = folder / program
    script.write_text("import time\nprint(flush=True)\ntime.sleep(60)\n", encoding="utf-8")
    command = [sys.executable, script.absolute(), *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        start_new_session=True,
    ) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"\n"
            processes._find.cache_clear()  # it is found once a second
            yield started
        finally:
            started.kill()
            processes._find.cache_clear()


def become_rank(number: int, world: int, port: int, output: Path | None = None) -> None:
    """Be this rank by the environment; what it prints goes to the end of a file."""
    if output:  # the fork server was started under another test's captured output
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _run(rank: tuple[Any, ...], seconds: int, job: Job, words: tuple[Any, ...]) -> None:
    become_rank(*rank)
    faulthandler.dump_traceback_later(seconds, exit=True)
    job(*words)


def start_ranks(
    start: Job, job: Job, world: int, *words: Any, output: Path | None = None, seconds: int = 300
) -> list[Any]:
    """Start so many ranks, which call a job with these words; `start` makes a process."""
    port = free_port()
    started = [
        start(target=_run, args=((number, world, port, output), seconds, job, words))
        for number in range(world)
    ]
    for process in started:
        process.start()
    return started


def join_ranks(started: list[Any], output: Path | None = None, seconds: int = 300) -> None:
    """Wait until all have ended well; an error shows their output."""
    for process in started:
        process.join(seconds + 20)
        if process.exitcode != 0:
            for other in started:
                other.kill()
            text = output.read_text()[-6000:] if output and output.exists() else ""
            raise AssertionError(f"exit code {process.exitcode}: {text}")


def run_ranks(
    start: Job, job: Job, world: int, *words: Any, output: Path | None = None, seconds: int = 300
) -> None:
    """Run a job in so many ranks to its end."""
    started = start_ranks(start, job, world, *words, output=output, seconds=seconds)
    join_ranks(started, output, seconds)
