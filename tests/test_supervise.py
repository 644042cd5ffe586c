"""The small parent: output and exit code come through, signals reach, nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.builders.processes import is_running, wait_until

from zerotrain.machine import child_process as module
from zerotrain.machine.child_process import SUPERVISOR, end_with_parent, supervise, supervisor_mark

SECONDS = 30
"""Longer than any of this takes."""

SUPERVISOR_PROGRAM = """
import sys
from pathlib import Path
from zerotrain.machine import child_process as module
from zerotrain.machine.child_process import supervise

module.SAME_SECONDS = 0.0  # a test does not wait before it insists

def note(number):
    print(f"noted {number}", file=sys.stderr, flush=True)

log, listens, *command = sys.argv[1:]
sys.exit(supervise(command, log=Path(log), on_signal=note if listens == "listens" else None))
"""

CHILD = """
import signal, sys, time
from zerotrain.machine.child_process import end_with_parent
end_with_parent()
said = lambda number, frame: print(f"got {number}", flush=True)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, said)
print("ready", flush=True)
for _ in range(600):
    time.sleep(0.1)  # the thread that hears a signal may be another than the one that handles it
"""

LAUNCHER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(sys.argv[2:], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(60)
"""


def python(code: str, *arguments: str | Path) -> list[str]:
    """A command that runs Python code."""
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of the supervised command; its folder is made."""
    return tmp_path / "logs" / "stage.log"


@pytest.fixture
def start(log: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a supervising process; what the test leaves of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def act(command: list[str], *, listens: bool = False, **options: object) -> object:
        words = python(SUPERVISOR_PROGRAM, log, "listens" if listens else "hands on", *command)
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
        started.append(process)
        return process

    yield act  # type: ignore[misc]
    for process in started:
        process.kill()
        process.communicate()


def logged(log: Path, text: str) -> Callable[[], bool]:
    """Whether a text stands in a log."""
    return lambda: log.is_file() and text in log.read_text(encoding="utf-8")


@pytest.mark.parametrize("code", [0, 1, 2, 85])
def test_exit_code_comes_through(code: int) -> None:
    """What the command returns is returned."""
    assert supervise(["sh", "-c", f"exit {code}"], log=None) == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_signals_become_exit_codes(number: int) -> None:
    """128 + n, as a shell has it."""
    assert supervise(["sh", "-c", f"kill -{int(number)} $$"], log=None) == 128 + number


def test_output_is_copied(log: Path, capfd) -> None:
    """Both streams go to stderr as they come and into the log, which is appended to."""
    for word in ("first", "second"):
        supervise(["sh", "-c", f"echo {word}; echo {word} error >&2"], log=log)
    expected = "first\nfirst error\nsecond\nsecond error\n"
    assert log.read_text(encoding="utf-8") == expected
    assert capfd.readouterr().err == expected


def test_a_bar_is_one_line_of_the_log(log: Path, capfd) -> None:
    """A line that is drawn over and over is logged as it was last; colours are not logged."""
    drawn = r"\r  0%%\r 50%%\r\033[32m100%%\033[0m done\nnext\r\nlast\r 7%%\r 8%%"
    supervise(["printf", drawn], log=log)
    assert log.read_text(encoding="utf-8") == "100% done\nnext\n 8%\n"
    assert "\r 50%\r" in capfd.readouterr().err


def test_a_long_bar_is_not_remembered(log: Path) -> None:
    """A bar is a line without an end for hours: of two megabytes, less than one is ever held."""
    code = (
        "import sys\nfor i in range(20000): sys.stdout.write(f'\\r{i:0100d}'); sys.stdout.flush()"
    )
    tracemalloc.start()
    try:
        supervise(python(code), log=log)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 10**6
    assert log.read_text(encoding="utf-8") == f"{19999:0100d}\n"


def test_environment_and_group_are_the_childs_own(log: Path) -> None:
    """It knows who supervises it, and leads a session of its own."""
    code = (
        "import os\n"
        f"names = ('A', '{SUPERVISOR}')\n"
        "print(*(os.environ[name] for name in names), os.getsid(0) == os.getpid())"
    )
    environment = {"A": "a", "PATH": os.environ["PATH"]}
    supervise(python(code), log=log, environment=environment)
    assert log.read_text(encoding="utf-8") == f"a {supervisor_mark()} True\n"


def test_a_command_that_is_not_there_leaves_nothing_open() -> None:
    """Neither descriptors nor signal handlers are left."""
    before = len(list(Path("/proc/self/fd").iterdir())), signal.getsignal(signal.SIGTERM)
    with pytest.raises(FileNotFoundError):
        supervise(["/no/such/program"], log=None)
    supervise(["true"], log=None)
    after = len(list(Path("/proc/self/fd").iterdir())), signal.getsignal(signal.SIGTERM)
    assert after == before


def test_a_failure_of_ours_leaves_no_command_behind(log: Path) -> None:
    """Whatever is raised while the command runs, it ends."""
    seen: list[int] = []

    def fail(number: int) -> None:
        seen.append(int(log.read_text(encoding="utf-8")))
        raise RuntimeError

    def signal_when_it_runs() -> None:
        wait_until(lambda: log.exists() and log.read_text(encoding="utf-8").endswith("\n"))
        os.kill(os.getpid(), signal.SIGUSR1)

    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    threading.Thread(target=signal_when_it_runs).start()
    with pytest.raises(RuntimeError):
        supervise(python(code), log=log, on_signal=fail)
    wait_until(lambda: not is_running(seen[0]))


def test_a_signal_that_another_thread_hears_is_handed_on(log: Path) -> None:
    """The kernel may give it to any thread, and Python handles it in the main one alone, which
    must not sleep for as long as the command runs."""

    def hear() -> None:
        wait_until(lambda: log.exists() and log.read_text(encoding="utf-8").endswith("\n"))
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    threading.Thread(target=hear).start()
    code = "import time\nprint('ready', flush=True)\ntime.sleep(20)"
    assert supervise(python(code), log=log) == 128 + signal.SIGUSR1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_first_signal_is_handed_on_and_the_second_ends_it(start, log: Path, number: int) -> None:
    """The command may end as it likes; a person who insists is heard."""
    process = start(python(CHILD))
    wait_until(logged(log, "ready"))
    process.send_signal(number)
    wait_until(logged(log, f"got {int(number)}"))
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(SECONDS) == 128 + signal.SIGKILL


def test_a_signal_that_arrives_twice_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster signals every process, and Snakemake hands the same on; later it is a second one,
    which ends the command."""
    noted: list[int] = []
    ended: list[int] = []
    now = [100.0]
    monkeypatch.setattr(module, "_signal_group", lambda group, number: ended.append(number))
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    signals = module._Signals(noted.append)
    signals.started(1)
    signals(signal.SIGTERM, None)
    now[0] += module.SAME_SECONDS
    signals(signal.SIGINT, None)
    assert (noted, ended) == ([signal.SIGTERM], [])
    now[0] += 0.1
    signals(signal.SIGTERM, None)
    assert (noted, ended) == ([signal.SIGTERM], [signal.SIGKILL])


def test_first_signal_goes_to_the_listener_instead(start, log: Path, tmp_path: Path) -> None:
    """A stage that knows better than its launcher is asked first; the child sees no signal."""
    place = tmp_path / "pid"
    code = f"import os, pathlib; pathlib.Path({str(place)!r}).write_text(str(os.getpid()))" + CHILD
    process = start(python(code), listens=True)
    wait_until(logged(log, "ready"))
    process.send_signal(signal.SIGHUP)
    assert process.stderr.readline() == "ready\n"
    assert process.stderr.readline() == f"noted {int(signal.SIGHUP)}\n"
    # Had SIGHUP been handed on, Python would handle it before this one, whose number is higher.
    os.kill(int(place.read_text()), signal.SIGUSR1)
    wait_until(logged(log, f"got {int(signal.SIGUSR1)}"))
    assert log.read_text(encoding="utf-8") == f"ready\ngot {int(signal.SIGUSR1)}\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 128 + signal.SIGKILL


def test_what_is_ignored_stays_ignored(start, log: Path) -> None:
    """`nohup zerotrain ...` survives the terminal."""
    process = start(python(CHILD), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_until(logged(log, "ready"))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    wait_until(logged(log, f"got {int(signal.SIGUSR1)}"))
    assert log.read_text(encoding="utf-8") == f"ready\ngot {int(signal.SIGUSR1)}\n"


def test_what_a_jobs_shell_ignores_is_heard(start, log: Path) -> None:
    """It ignores a cluster's warning to live until the training has written its checkpoint."""
    ignore = lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # noqa: E731
    process = start(python(CHILD), preexec_fn=ignore)
    wait_until(logged(log, "ready"))
    process.send_signal(signal.SIGUSR1)
    wait_until(logged(log, f"got {int(signal.SIGUSR1)}"))


def test_a_terminal_that_is_gone_does_not_stop_the_command(start, log: Path) -> None:
    """Output that no one takes any more is still read, and logged."""
    code = (
        "import sys, time\n"
        "print('ready', flush=True)\n"
        "time.sleep(0.3)\n"
        "for _ in range(9999): print('x' * 99)"
    )
    process = start(python(code))
    wait_until(logged(log, "ready"))
    process.stderr.close()
    assert process.wait(SECONDS) == 0
    assert log.read_text(encoding="utf-8").count("x" * 99) == 9999
    process.stderr = None


def test_killed_supervisor_takes_its_child_along(start, log: Path, tmp_path: Path) -> None:
    """kill -9 of the small parent: a child in a session of its own ends by itself, even while the
    parent is not yet reaped."""
    place = tmp_path / "pids"
    process = start(python(LAUNCHER, place, *python(CHILD)))
    wait_until(logged(log, "ready"))
    launcher, child = map(int, place.read_text().split())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{process.pid}").exists()
    wait_until(lambda: not is_running(child))
    # The launcher knows nothing of us; the test made it, the test ends it.
    os.kill(launcher, signal.SIGKILL)


def test_killed_launcher_takes_its_child_along(start, log: Path, tmp_path: Path) -> None:
    """A rank whose launcher died does not train on alone, and the supervisor returns."""
    place = tmp_path / "pids"
    process = start(python(LAUNCHER, place, *python(CHILD)))
    wait_until(logged(log, "ready"))
    launcher, child = map(int, place.read_text().split())
    os.kill(launcher, signal.SIGKILL)
    assert process.wait(SECONDS) == 128 + signal.SIGKILL
    assert not is_running(child)


def test_second_signal_leaves_nothing_behind(start, log: Path, tmp_path: Path) -> None:
    """Neither the launcher nor its child in another session is there after the end."""
    place = tmp_path / "pids"
    process = start(python(LAUNCHER, place, *python(CHILD)), listens=True)
    wait_until(logged(log, "ready"))
    pids = list(map(int, place.read_text().split()))
    process.send_signal(signal.SIGTERM)
    assert "ready" in process.stderr.readline()
    assert "noted" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.wait(SECONDS)
    wait_until(lambda: not any(map(is_running, pids)))


def test_what_the_command_left_running_is_ended(log: Path, monkeypatch) -> None:
    """Background processes of its group do not outlive it."""
    monkeypatch.setattr("zerotrain.machine.child_process.GRACE_SECONDS", 0.2)
    assert supervise(["sh", "-c", "sleep 60 & echo $!"], log=log) == 0
    wait_until(lambda: not is_running(int(log.read_text(encoding="utf-8"))))


def test_without_a_supervisor_nothing_is_watched(monkeypatch) -> None:
    """A command that a person runs by hand ends with no other process."""
    monkeypatch.delenv(SUPERVISOR, raising=False)
    monkeypatch.setattr("threading.Thread.start", lambda self: pytest.fail("a thread was started"))
    end_with_parent()


def test_on_a_terminal_the_command_sees_one(log: Path) -> None:
    """Bars are drawn where a person watches, at the width of the terminal; the log stays plain."""
    code = (
        "import os, sys\n"
        "print(sys.stderr.isatty(), os.get_terminal_size(2).columns, flush=True)\n"
        "sys.stderr.write('\\r 1%\\r 2%\\n')"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 97, 0, 0))
        os.execv(sys.executable, python(SUPERVISOR_PROGRAM, log, "hands on", *python(code)))
    shown = b""
    with contextlib.suppress(OSError):
        while select.select([terminal], [], [], SECONDS)[0]:
            shown += os.read(terminal, 4096)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert b"True 97" in shown
    assert b"\r 1%\r 2%" in shown
    assert log.read_text(encoding="utf-8") == "True 97\n 2%\n"
