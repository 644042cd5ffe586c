"""Start, stop and switch from the page: which commands are started, and whose they are."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from tests.builders.processes import sleeping
from tests.builders.refusals import refusal
from tests.builders.watched_runs import WatchedRun

from zerotrain.builder import processes
from zerotrain.builder.processes import (
    StartedCommand,
    SwitchChoice,
    is_at_work,
    plan_switch,
    read_output,
    read_started,
    start,
    stop,
    switch,
)
from zerotrain.machine.child_process import SUPERVISOR
from zerotrain.machine.processes import record_of

STAND_IN = """
import os, sys, time
supervisor = os.environ.get('ZEROTRAIN_SUPERVISOR')
print(*sys.argv[1:], supervisor, '\\x1b[31mred\\x1b[0m', flush=True)
while os.path.exists('busy'):
    time.sleep(0.02)
if os.path.exists('refused'):
    sys.exit('ERROR: cats: it is finished\\n  Hint: raise the last until')
"""
"""Prints its command, and works while there is a file `busy`."""


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedRun]:
    """A run of a project in which every command is a stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        processes, "_program", lambda words: [sys.executable, "-c", STAND_IN, *words]
    )
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config" / "launch").mkdir(parents=True)
    (tmp_path / "config" / "launch" / "zero2.yaml").touch()
    yield WatchedRun("cats")
    (tmp_path / "busy").unlink(missing_ok=True)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(started: StartedCommand) -> bool:
    return not started.is_alive


def test_start_is_the_command_of_a_shell_in_a_session_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command is what the documentation says, belongs to no server and to no supervisor, and a
    second start is refused while it runs."""
    monkeypatch.setenv(SUPERVISOR, "123:456")
    Path("busy").touch()
    started = start("cats")
    words = "snakemake --cores all train --configfile config/cats.yaml"
    wait_for(lambda: len(read_output("cats", "train", 9)) == 2)
    assert read_output("cats", "train", 9) == [f"$ {words}", f"{words} None red"]
    pid = started.process.pid
    assert os.getsid(pid) == pid != os.getsid(0)
    assert read_started("cats", "train") == started
    assert "works in this project already" in refusal(start, "cats")
    Path("busy").unlink()
    wait_for(lambda: ended(started))
    start("cats")


def test_stop_interrupts_what_does_not_train() -> None:
    """What a page has started is interrupted as by Ctrl-C, by any later server; nothing else is."""
    assert "nothing of it runs" in refusal(stop, "cats")
    Path("busy").touch()
    started = start("cats")
    wait_for(lambda: len(read_output("cats", "train", 9)) == 2)
    assert f"pid {started.process.pid} was interrupted" in stop("cats")
    wait_for(lambda: ended(started))
    assert "KeyboardInterrupt" in read_output("cats", "train", 9)[-1]


def test_stop_asks_a_training_by_its_stop_file(run: WatchedRun) -> None:
    """A training ends after its step: the file of the phase that trains is written, no signal."""
    progress = run.lock("offload")
    received: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        assert stop("cats").startswith(f"offload: pid {os.getpid()}")
    finally:
        signal.signal(signal.SIGINT, former)
    assert (progress / "stop").is_file()
    assert received == []


def test_switch_starts_the_training_again_once_it_has_succeeded() -> None:
    """The command is `zerotrain switch`; the next start follows it, and another has to wait."""
    Path("busy").touch()
    switched = switch("cats", SwitchChoice("zero2", 2, "bf16"), then_start=True)
    options = "--to zero2 --num-processes 2 --mixed-precision bf16"
    assert shlex.join(switched.words) == f"zerotrain switch config/cats.yaml {options}"
    assert "is being switched" in refusal(start, "cats")
    assert "is being switched" in refusal(switch, "cats", SwitchChoice("zero2"), then_start=True)
    assert read_started("cats", "train") is None
    Path("busy").unlink()
    wait_for(lambda: read_started("cats", "train"))
    Path("refused").touch()
    Path("results/cats/logs/builder.train.json").unlink()
    failed = switch("cats", SwitchChoice("zero2"), then_start=True)
    wait_for(lambda: ended(failed))
    assert read_started("cats", "train") is None


def test_plan_of_a_switch_is_its_dry_run_or_its_error() -> None:
    """A refusal is the command's own sentence and hint."""
    assert "switch config/cats.yaml --to zero2 --dry-run" in plan_switch(
        "cats", SwitchChoice("zero2")
    )
    Path("refused").touch()
    assert refusal(plan_switch, "cats", SwitchChoice("zero2")) == (
        "ERROR: cats: it is finished\n  Hint: raise the last until"
    )


@pytest.mark.parametrize(
    "choice",
    [
        SwitchChoice(), SwitchChoice("--at"), SwitchChoice("../zero2"), SwitchChoice(None, 0),
        SwitchChoice(None, 10**9), SwitchChoice(None, None, "--accept"),
    ],
)  # fmt: skip
def test_values_that_do_not_exist_start_nothing(choice: SwitchChoice) -> None:
    """Presets, precisions and numbers are checked before any command has them as words."""
    assert refusal(switch, "cats", choice, then_start=True)
    assert not Path("results/cats/logs").exists()


def test_a_snakemake_of_a_shell_is_found_and_interrupted(run: WatchedRun) -> None:
    """By the run that its configuration names; another run's continues, none starts meanwhile."""
    WatchedRun("dogs")
    with sleeping("snakemake", "--configfile", str(run.file)) as started:
        assert "nothing of it runs" in refusal(stop, "dogs")
        assert f"already, as pid {started.pid}" in refusal(start, "dogs")
        assert stop("cats").startswith(f"pid {started.pid} was interrupted")
        assert started.wait(20) == -signal.SIGINT


TRAIN = ["snakemake", "--cores", "all", "train", "--configfile", "config/cats.yaml"]


@pytest.mark.parametrize(
    ("words", "of", "here", "later"),
    [
        (TRAIN, TRAIN, True, 1.0),  # whoever has the pid after the command that was started
        (["make", "all"], ["make", "all"], True, 0.0),
        (TRAIN, ["make", "all"], True, 0.0),
        (TRAIN, TRAIN, False, 0.0),
        ([], ["make", "all"], True, 0.0),
    ],
)
def test_a_process_that_a_record_names_is_not_interrupted(
    run: WatchedRun, tmp_path: Path, words: list[str], of: list[str], here: bool, later: float
) -> None:
    """A record outlives its process, and may be from somebody else: only a command that a page
    starts, in this project, is shown and gets a signal."""
    other = tmp_path / "other"
    other.mkdir()
    child = psutil.Popen(
        [sys.executable, "-c", "input()", *of], stdin=-1, cwd=None if here else other,
        start_new_session=True,
    )  # fmt: skip
    try:
        record = run.folder.path / "logs" / "builder.train.json"
        record.parent.mkdir(parents=True)
        process = record_of(child.pid)
        found = StartedCommand(replace(process, started=process.started - later * 100), words)
        record.write_text(json.dumps(asdict(found)))
        assert "nothing of it runs" in refusal(stop, "cats")
        assert child.poll() is None
        started = read_started("cats", "train")
        assert started is not None
        assert not started.is_alive
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"process": {"pid": -1}, "words": []}', "[" * 100_000], ids=range(4)
)
def test_a_record_that_is_none_counts_as_missing(run: WatchedRun, text: str) -> None:
    """Also a list without an end."""
    record = run.folder.path / "logs" / "builder.train.json"
    record.parent.mkdir(parents=True)
    record.write_text(text)
    assert read_started("cats", "train") is None
    assert not is_at_work("cats")


def test_pipes_and_folders_in_the_place_of_logs_are_not_waited_for(run: WatchedRun) -> None:
    """No thread of the server is lost to them, and no button works before they are removed."""
    logs = run.folder.path / "logs"
    logs.mkdir(parents=True)
    os.mkfifo(logs / "builder.train.log")
    os.mkfifo(logs / "builder.train.json")
    (logs / "builder.switch.log").mkdir()
    assert read_output("cats", "train", 9) == read_output("cats", "switch", 9) == []
    assert read_started("cats", "train") is None
    assert f"{logs}/builder.train" in refusal(start, "cats")
