"""What the stage says of a training whose processes left no word, and what they leave for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.phases import make_phase
from tests.training.endings import beat, start

from zerotrain.errors import EXIT_USER_ERROR
from zerotrain.launch.files import write_run_yaml
from zerotrain.machine.child_process import SUPERVISOR
from zerotrain.machine.host import oom_kills
from zerotrain.machine.ports import free_port
from zerotrain.stages import train_phase
from zerotrain.training import rank
from zerotrain.training.checkpointing.progress_folder import EXIT, exit_codes_file
from zerotrain.training.process import ending
from zerotrain.training.process.ending import LaunchDeath, read_exit_record
from zerotrain.training.reporting.heartbeat import RankStatus

KILL = -signal.SIGKILL


def explain(progress: Path, ended: dict[int, int], *lines: str) -> str:
    """What is reported of processes that ended so."""
    exit_codes_file(progress, 0).write_text(json.dumps(ended))
    error = LaunchDeath().explain("main", progress, 10, 1, lines)
    assert error.hint
    return error.what


def test_the_process_that_died_first_is_named(tmp_path: Path) -> None:
    """Not those that lost it, and not those that the launcher has ended."""
    newest = "no checkpoint was saved yet"
    assert explain(tmp_path, {0: 1, 1: KILL}) == (
        f"phase main: rank 1 was killed by SIGKILL; {newest}"
    )
    assert explain(tmp_path, {0: -signal.SIGTERM, 2: -signal.SIGSEGV}) == (
        f"phase main: rank 2 was killed by SIGSEGV: a compiled library has failed; {newest}"
    )
    assert explain(tmp_path, {0: -signal.SIGBUS}) == (
        f"phase main: rank 0 was killed by SIGBUS: what it had mapped is gone; {newest}"
    )
    assert explain(tmp_path, {1: 1}) == (
        "phase main: its training process ended without a word to us (exit code 1 of rank 1); "
        f"{newest}"
    )


def test_words_of_a_library_that_ended_its_process_count(tmp_path: Path) -> None:
    """NCCL aborts without an exception: what it wrote tells more than the signal."""
    line = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"
    lost = "Connection closed by peer [::1]:4"
    said = explain(tmp_path, {0: -signal.SIGABRT, 1: 1}, "step 3", lost, line)
    assert said.startswith(
        "phase main: a process did not come to where the others wait for it: [Rank 0] Watchdog"
    )
    assert explain(tmp_path, {1: KILL}, lost).startswith("phase main: rank 1 was killed by SIGKILL")


def test_a_killed_launcher_is_distinguished_from_a_fault(tmp_path: Path) -> None:
    """It has kept nothing, and there is no traceback to look for."""
    error = LaunchDeath().explain("main", tmp_path, 10, 128 + signal.SIGKILL, [])
    assert error.what.startswith(
        "phase main: the launcher of its processes was killed by SIGKILL; no checkpoint"
    )
    assert "traceback" not in error.hint
    assert "without a word" in LaunchDeath().explain("main", tmp_path, 10, 255, []).what


def test_a_lost_connection_counts_where_no_process_was_killed(tmp_path: Path) -> None:
    """A network between machines: every process is whole, and has lost the others."""
    lost = "rank 0: Connection closed by peer [::1]:4"
    assert explain(tmp_path, {0: 1, 1: 1}, lost).startswith(
        "phase main: the connection to another process is lost: rank 0: Connection closed by peer"
    )


def test_what_does_not_end_a_training_is_no_cause(tmp_path: Path) -> None:
    """A tracker's failure, of which we say ourselves that training continues."""
    ours = "main: tracker wandb fails (No space left on device); training continues, and"
    assert "without a word" in explain(tmp_path, {0: 1}, ours)


def test_a_kill_for_memory_counts_more_than_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others say of it, a time-out or a lost peer, is its consequence."""
    line = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"
    exit_codes_file(tmp_path, 0).write_text(json.dumps({0: 1, 1: KILL}))
    before = LaunchDeath()
    monkeypatch.setattr(ending, "oom_kills", lambda: tuple(n + 1 for n in before._killed_before))
    said = before.explain("main", tmp_path, 10, 1, [line]).what
    assert said.startswith("phase main: rank 1 was killed by SIGKILL: the memory of its control")


def test_after_a_time_out_the_one_that_hung_is_named(tmp_path: Path) -> None:
    """By what each has reported last: all have ended by the time that the stage asks."""
    line = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"

    def said(*found: RankStatus) -> str:
        for one in found:
            path = tmp_path / "ranks" / f"{one.rank:05d}.json"
            path.parent.mkdir(exist_ok=True)
            ended = replace(one, process=replace(one.process, pid=2**22 - 3))
            path.write_text(json.dumps(asdict(ended)))
        return explain(tmp_path, {0: -signal.SIGABRT}, line)

    who = rf"; rank 1 \(pid {2**22 - 3} on \S+\) "
    waits = beat(0, waits=True), beat(2, waits=True, ago=6)
    late = rf"{who}was last seen 600 s before the others in x of step 4; no checkpoint"
    assert re.search(late, found := said(*waits, beat(1, ago=600))), found
    still = rf"{who}did not move in x of step 4; no checkpoint"
    assert re.search(still, found := said(*waits, beat(1))), found
    behind = rf"{who}waited for the others in x of step 3; no checkpoint"
    assert re.search(behind, found := said(*waits, beat(1, step=3, waits=True))), found


@pytest.mark.parametrize(
    ("kills", "said"),
    [
        ((1, 1), "SIGKILL: the memory of its control group (a container's or a job's) is used up"),
        ((0, 1), "SIGKILL: the machine's memory is used up"),
        ((0, 0), "SIGKILL; no checkpoint"),
    ],
)
def test_a_kill_for_memory_is_distinguished_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, int], said: str
) -> None:
    """The kernel counts whom it has killed for memory; what it counted before does not matter."""
    exit_codes_file(tmp_path, 0).write_text(json.dumps({0: KILL}))
    monkeypatch.setattr(ending, "oom_kills", lambda: (3, 5))
    before = LaunchDeath()
    monkeypatch.setattr(ending, "oom_kills", lambda: (3 + kills[0], 5 + kills[1]))
    assert f"rank 0 was killed by {said}" in before.explain("main", tmp_path, 10, 1, []).what


def test_the_kernels_counts(tmp_path: Path) -> None:
    """Of our control group, of either version, and of the machine."""
    assert oom_kills(tmp_path) == (0, 0)
    for name, text in {
        "proc/self/cgroup": "0::/job\n",
        "proc/vmstat": "pgfault 3\noom_kill 7\n",
        "sys/fs/cgroup/job/memory.events": "oom 4\noom_kill 2\noom_group_kill 0\n",
        "sys/fs/cgroup/memory.events": "oom_kill 6\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == (2, 7)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n")
    old = tmp_path / "sys/fs/cgroup/memory/old"
    old.mkdir(parents=True)
    (old / "memory.oom_control").write_text("under_oom 0\noom_kill 5\n")
    (tmp_path / "sys/fs/cgroup/memory.events").unlink()
    assert oom_kills(tmp_path) == (5, 7)


def test_the_first_word_counts(tmp_path: Path) -> None:
    """All processes find a mistake; one of them says it."""
    assert ending.write_exit_record(tmp_path, 2, "first", hint="so", measured={"total": 1})
    assert not ending.write_exit_record(tmp_path, 1, "second")
    left = read_exit_record(tmp_path)
    assert left is not None
    assert (left.code, left.reason, left.hint, left.measured) == (2, "first", "so", {"total": 1})
    ending.clear(tmp_path)
    assert read_exit_record(tmp_path) is None


def test_the_first_word_is_complete_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that finds it kills the one that wrote it, even between two of its instructions."""
    sizes: list[int] = []
    opened = Path.open

    def look(path: Path, *args: Any, **kwargs: Any) -> Any:
        stream = opened(path, *args, **kwargs)
        if (tmp_path / EXIT).exists():
            sizes.append((tmp_path / EXIT).stat().st_size)
        return stream

    monkeypatch.setattr(Path, "open", look)
    assert ending.write_exit_record(tmp_path, 2, "first")
    monkeypatch.undo()
    assert 0 not in sizes
    assert read_exit_record(tmp_path) == ending.ExitRecord(2, "first")
    assert [path.name for path in tmp_path.iterdir()] == [EXIT]
    (tmp_path / f"{ending.DRAFT}killed").write_text("{")
    ending.clear(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_launcher_leaves_no_folder(tmp_path: Path) -> None:
    """torchrun makes torchelastic_* among temporary files, for logs that the launcher has none of;
    the exit codes of two processes come through all the same."""
    write_run_yaml(make_phase(), tmp_path / "run.yaml")
    (tmp_path / "script.py").write_text("import os, sys; sys.exit(7 * int(os.environ['RANK']))")
    (tmp_path / "temporary").mkdir()
    folders = [word for name in ("launch", "base", "cache") for word in (f"--{name}", tmp_path)]
    command = [
        *(sys.executable, "-m", "zerotrain.training.process.launcher", str(tmp_path)),
        *("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
        *("--dynamo_backend", "no", "--main_process_port", str(free_port())),
        *(str(tmp_path / "script.py"), *map(str, folders)),
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(exit_codes_file(tmp_path, 0).read_text()) == {"1": 7}
    assert not [*(tmp_path / "temporary").iterdir()]


SCRIPT = """
import os, pathlib, signal, sys, time
progress, what = pathlib.Path(sys.argv[-2]), sys.argv[-1]
if what == "code":
    sys.exit(7)
if what == "die":
    os.kill(os.getpid(), signal.SIGSEGV)
os.kill(os.getppid(), signal.SIGTERM)
deadline = time.monotonic() + 20
while not (progress / "stop").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "ended"), [("die", {"0": -11}), ("code", {"0": 7}), ("stop", None)]
)
def test_the_launcher_keeps_how_a_process_ended(
    tmp_path: Path, what: str, ended: dict[str, int] | None
) -> None:
    """The signal or the code, without a traceback of the launcher's; a signal to the launcher is a
    request to stop, and no end of it."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    write_run_yaml(make_phase(), tmp_path / "run.yaml")
    folders = [word for name in ("launch", "base", "cache") for word in (f"--{name}", tmp_path)]
    command = [
        *(sys.executable, "-m", "zerotrain.training.process.launcher", str(tmp_path)),
        *("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"),
        *("--dynamo_backend", "no", str(script), *map(str, folders), str(tmp_path), what),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (1 if ended else 0), done.stderr
    assert "Traceback" not in done.stderr
    file = exit_codes_file(tmp_path, 0)
    assert (json.loads(file.read_text()) if file.exists() else None) == ended
    assert (tmp_path / "stop").exists() == (what == "stop")


def test_the_stage_answers_an_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launched process leaves its figures and says nothing itself; the stage, which asks the
    planner, says it once, with what was saved, and returns the code."""
    monkeypatch.setenv(SUPERVISOR, "1")
    monkeypatch.setattr(rank, "end_with_parent", lambda: None)
    (tmp_path / "progress").mkdir()
    words = "CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated"
    start(tmp_path / "progress", monkeypatch, torch.OutOfMemoryError(words))
    assert capsys.readouterr().err == ""
    left = read_exit_record(tmp_path / "progress")
    assert left is not None
    assert left.kind == "device_memory"
    code = train_phase._answer(make_phase(), tmp_path, tmp_path / "progress", 1, LaunchDeath(), [])
    assert code == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(
        "ERROR: phase plain: the device ran out of memory: CUDA out of memory. Tried to allocate "
        "2.00 GiB.; no checkpoint was saved yet\n  Hint: "
    )
    assert "what would fit is not known: no file in config has the run cats" in said
    assert said.count("ERROR: ") == said.count("Hint: ") == 1


def test_a_planner_that_fails_hides_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it stumbles over after a failure: the known answer is given."""

    def stumble(*_: object) -> None:
        raise AttributeError("no such trace")

    monkeypatch.setattr("zerotrain.launch.planner.fit.advise_after_out_of_memory", stumble)
    ending.write_exit_record(
        tmp_path, EXIT_USER_ERROR, "phase plain: too large", "less", "device_memory"
    )
    code = train_phase._answer(make_phase(), tmp_path, tmp_path, 1, LaunchDeath(), [])
    assert code == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said == "ERROR: phase plain: too large; no checkpoint was saved yet\n  Hint: less\n"
