"""`zerotrain switch` among others: a second one, an editor, signals, disks that cannot be written.

Windows are held open by hooks in what calls Snakemake, never by waiting.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.builders.processes import DEAD_PID
from tests.builders.refusals import refused
from tests.switch.conftest import (
    CONFIG,
    contents,
    export,
    finish,
    make_inputs,
    save,
    start_training,
)

from zerotrain.config.read import read_config
from zerotrain.errors import PipelineError
from zerotrain.graph import reruns
from zerotrain.graph import snakemake as snakemake_calls
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.switch import (
    command as switch,
)
from zerotrain.graph.switch import (
    plan as switch_plan,
)
from zerotrain.graph.switch import point as switch_checks

pytestmark = pytest.mark.usefixtures("project")

FILE = Path("config/flowers.yaml")
RACER = """
import sys
from zerotrain.graph import snakemake as snakemake_calls
from zerotrain.graph import reruns
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.switch import command as switch
from zerotrain.errors import PipelineError

def reach(event):
    print(event, flush=True)
    if sys.stdin.readline() == "fail\\n":
        raise PipelineError("Snakemake failed", hint="none")

def plan(runs, targets):
    reach("plan")
    return dict.fromkeys(("render_launch", "train_phase", "export_weights"), 1)

reruns.count_jobs, snakemake_calls.make = plan, lambda config, targets: reach("make")
try:
    print("done:", switch.switch(SwitchOptions("flowers", sys.argv[1])))
except PipelineError as error:
    print("refused:", error.what)
"""


@pytest.fixture
def saved() -> Path:
    """The first phase was stopped at step 100, and its progress goes with whatever it is now."""
    make_inputs()
    return save("plain", 100)


Hook = Callable[[int], None]


@pytest.fixture
def snakemake(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stands in for Snakemake, which exports at the second call; hooks run in each call."""

    def stand_in(plan: Hook = lambda call: None, make: Hook = lambda call: None) -> None:
        calls = {"plan": 0, "make": 0}

        def planned(runs: object, targets: list[str]) -> dict[str, int]:
            calls["plan"] += 1
            plan(calls["plan"])
            return dict.fromkeys(switch_checks.PUBLISHING, 1)

        def made(config: Path, targets: list[str]) -> None:
            calls["make"] += 1
            make(calls["make"])
            if "launch" not in targets[0]:
                export("plain", 100)

        monkeypatch.setattr(reruns, "count_jobs", planned)
        monkeypatch.setattr(snakemake_calls, "make", made)

    stand_in()
    return stand_in


def edit(old: str, new: str) -> None:
    """Save an edit as an editor does: a new file takes the old one's name."""
    text = FILE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    draft = FILE.with_suffix(".swp")
    draft.write_text(text.replace(old, new))
    draft.replace(FILE)


SWITCHED = CONFIG.replace(
    "until: 300, launch: torch, global_batch_size: 4}",
    "until: 100, launch: torch, global_batch_size: 4}\n"
    "  - {name: plain-zero2, until: 300, launch: zero2, global_batch_size: 4}",
)


class Racer:
    """A `zerotrain switch` of another process, which waits at each call of Snakemake."""

    def __init__(self, preset: str) -> None:
        words = [sys.executable, "-c", RACER, preset]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def said(self) -> str:
        """The call that it has reached, or how it ended."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def answer(self, how: str = "go") -> str:
        """Let it continue to the next call, or let the one that it has reached fail."""
        assert self.process.stdin
        self.process.stdin.write(f"{how}\n")
        self.process.stdin.flush()
        return self.said()


@pytest.fixture
def racer() -> Iterator[Callable[[str], Racer]]:
    """Starts switches, and ends those that are left."""
    racers = []

    def start(preset: str) -> Racer:
        racers.append(Racer(preset))
        return racers[-1]

    yield start
    for one in racers:
        one.process.kill()
        one.process.communicate()


@pytest.mark.slow
def test_a_second_switch_of_a_run_cannot_lose_the_first(saved, racer) -> None:
    """One switch of a run works at a time, from reading to the end: the second is refused and
    reported whose turn it is. Whoever says that it is done has its phase in the configuration."""
    first = racer("zero2")
    assert first.said() == "plan"
    second = racer("zero3")
    ends = {"zero3": second.said()}
    if ends["zero3"] == "plan":  # then it has read the file, and loses what the first undoes
        assert first.answer() == "make"
        assert second.answer() == "make"
        ends["zero2"] = first.answer("fail")
        assert second.answer() == "make"
        export("plain", 100)
        ends["zero3"] = second.answer()
    else:
        assert first.answer() == "make"
        assert first.answer() == "make"
        export("plain", 100)
        ends["zero2"] = first.answer()
    names = [phase.name for phase in read_config(FILE).phases]
    done = [
        preset for preset, end in ends.items() if end.startswith("done: plain: ends at step 100")
    ]
    assert [f"plain-{preset}" in names for preset in done] == [True]
    assert FILE.read_text(encoding="utf-8") == SWITCHED
    assert ends["zero3"].startswith(
        f"refused: {FILE}: another switch of it is under way: pid {first.process.pid} "
        f"on {socket.gethostname()}, since "
    )


def test_a_dry_run_during_a_switch_is_refused_too(snakemake) -> None:
    """What it would show is the middle of the other's work."""
    told = []

    def make(call: int) -> None:
        error = refused(switch.switch, SwitchOptions("flowers", "zero3", dry_run=True))
        told.append(error.what)

    snakemake(make=make)
    switch.switch(SwitchOptions("flowers", "zero2"))
    assert [f"pid {os.getpid()} on" in what for what in told] == [True, True]


@pytest.mark.parametrize("call", [1, 2])
def test_an_edit_that_is_saved_while_a_switch_plans_is_kept(snakemake, call: int) -> None:
    """The change is made of the bytes that are there, which are planned again."""
    seen = []

    def plan(number: int) -> None:
        seen.append(number)
        if number <= call:
            edit("run: flowers", f"# mine {number}\nrun: flowers")

    snakemake(plan=plan)
    switch.switch(SwitchOptions("flowers", "zero2"))
    mine = "".join(f"# mine {number}\n" for number in range(1, call + 1))
    assert FILE.read_text(encoding="utf-8") == mine + SWITCHED
    assert seen == list(range(1, call + 2))


def test_an_edit_of_what_is_cut_is_planned_again(snakemake) -> None:
    """As when the end of the phase is moved: the new phase continues to where it is now."""
    snakemake(plan=lambda call: edit("until: 300", "until: 350") if call == 1 else None)
    assert "was 350" in switch.switch(SwitchOptions("flowers", "zero2"))
    assert FILE.read_text(encoding="utf-8") == SWITCHED.replace("until: 300", "until: 350")


def test_an_edit_that_is_saved_at_the_moment_of_writing_is_kept(snakemake, monkeypatch) -> None:
    """Between the last look at the file and its replacement."""
    from zerotrain.artifact import whole_file

    exchange, saves = whole_file._swap, iter([f"# one\n{CONFIG}", f"# one\n# two\n{CONFIG}"])

    def exchange_late(one: Path, other: Path) -> bool:
        if mine := next(saves, None):
            FILE.with_suffix(".swp").write_text(mine)
            FILE.with_suffix(".swp").replace(FILE)
        return exchange(one, other)

    monkeypatch.setattr(whole_file, "_swap", exchange_late)
    former = set(contents())
    switch.switch(SwitchOptions("flowers", "zero2"))
    assert FILE.read_text(encoding="utf-8") == f"# one\n# two\n{SWITCHED}"
    assert set(contents()) == former


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), PipelineError("it failed", hint="none")])
def test_an_edit_that_is_saved_during_the_export_outlives_an_undo(
    snakemake, failure, capfd
) -> None:
    """The undo takes back the switch alone."""

    def make(call: int) -> None:
        if call == 2:
            edit("run: flowers", "# mine\nrun: flowers")
            edit("700, launch: zero2_offload", "900, launch: zero3")
            raise failure

    snakemake(make=make)
    with pytest.raises(type(failure)) as caught:
        switch.switch(SwitchOptions("flowers", "zero2"))
    mine = f"# mine\n{CONFIG}".replace("700, launch: zero2_offload", "900, launch: zero3")
    assert FILE.read_text(encoding="utf-8") == mine
    said = f"{caught.value}{capfd.readouterr().err}"
    assert f"{FILE} is as it was, with what was edited since" in said


def test_an_edit_of_the_new_phase_is_left_by_an_undo(snakemake) -> None:
    """The lines that undo the switch are printed."""

    def make(call: int) -> None:
        if call == 2:
            edit("name: plain-zero2, until: 300", "name: mine, until: 300")
            edit("until: 100", "until: 120")
            raise PipelineError("it failed", hint="none")

    snakemake(make=make)
    error = refused(switch.switch, SwitchOptions("flowers", "zero2"))
    assert FILE.read_text(encoding="utf-8") == SWITCHED.replace("plain-zero2", "mine").replace(
        "100", "120"
    )
    assert f"it failed; {FILE} was edited since, and is left as it is" in error.what
    snakemake(make=lambda call: (edit("zero2, global", "zero1, global"), 1 / 0))
    FILE.write_text(CONFIG, encoding="utf-8")
    with pytest.raises(ZeroDivisionError):
        switch.switch(SwitchOptions("flowers", "zero2"))
    assert FILE.read_text(encoding="utf-8") == SWITCHED.replace("zero2, global", "zero1, global")


def test_the_lines_that_undo_a_switch_are_printed(snakemake) -> None:
    """Where the same lines were edited, only a person can."""

    def make(call: int) -> None:
        edit("launch: zero2, global_batch_size: 4", "launch: zero2, global_batch_size: 8")
        raise PipelineError("it failed", hint="none")

    snakemake(make=make)
    assert refused(switch.switch, SwitchOptions("flowers", "zero2")).what == (
        f"it failed; {FILE} was edited since, and is left as it is: it has the switch; to undo it, "
        "remove the phase plain-zero2, and give plain the lines that it had:\n"
        "      - {name: plain, until: 300, launch: torch, global_batch_size: 4}"
    )


def test_a_switch_that_lost_its_configuration_is_not_done(snakemake) -> None:
    """An editor that had the old text saves it during the export: the command says so, and called
    again it is done, with what was edited."""
    lost = f"# mine\n{CONFIG}"
    snakemake(make=lambda call: FILE.write_text(lost, encoding="utf-8") if call == 2 else None)
    assert refused(switch.switch, SwitchOptions("flowers", "zero2")).what == (
        f"{FILE}: was edited during the switch and has lost it: its phases are plain until 300 "
        f"steps, large until 700 steps; {FILE} was edited since, and is left as it is"
    )
    assert FILE.read_text(encoding="utf-8") == lost
    snakemake()
    switch.switch(SwitchOptions("flowers", "zero2"))
    assert FILE.read_text(encoding="utf-8") == f"# mine\n{SWITCHED}"


def test_a_switch_whose_export_is_of_another_step_is_not_done(snakemake, monkeypatch) -> None:
    """Whatever Snakemake says."""
    monkeypatch.setattr(snakemake_calls, "make", lambda config, targets: export("plain", 90))
    assert refused(switch.switch, SwitchOptions("flowers", "zero2")).what == (
        "results/flowers/plain/checkpoint: ends at step 90; the switch was to end it at 100; "
        f"{FILE} is as it was"
    )

    def make(config: Path, targets: list[str]) -> None:
        export("plain", 90)
        finish("plain", 100)

    monkeypatch.setattr(snakemake_calls, "make", make)
    assert refused(switch.switch, SwitchOptions("flowers", "zero2")).what == (
        "results/flowers/plain/state: is of step 90; the checkpoint that was to be exported is of "
        f"step 100; {FILE} is as it was"
    )


def test_the_same_switch_again_is_done_already(snakemake) -> None:
    """Before the new phase has started, while it trains, and after the end of the run."""
    switch.switch(SwitchOptions("flowers", "zero2"))
    former = contents()
    done = "done already: plain ended at step 100, plain-zero2"
    command = "snakemake --cores all train --configfile config/flowers.yaml"
    for options in ({}, {"at": "100"}, {"name": "plain-zero2"}, {"dry_run": True}):
        said = switch.switch(SwitchOptions("flowers", "zero2", **options))
        assert said == f"{done} continues to 300 under zero2. Next: {command}"
    progress = save("plain-zero2", 150, preset="zero2")
    assert switch.switch(SwitchOptions("flowers", "zero2")).startswith(
        f"{done} continues to 300 under zero2. "
    )
    for options in ({"at": "120"}, {"name": "more"}):
        with pytest.raises(PipelineError):
            switch.switch(SwitchOptions("flowers", "zero2", **options))
    save("plain-zero2", 300, preset="zero2")
    with pytest.raises(PipelineError, match="trained to its end"):
        switch.switch(SwitchOptions("flowers", "zero3"))
    assert progress.is_dir()
    assert contents() == former


@pytest.mark.slow
@pytest.mark.parametrize("until", [1, 2])
def test_the_same_switch_completes_a_killed_one(snakemake, racer, until, capfd) -> None:
    """Killed after its edit, or with the export done and nothing reported."""
    former = set(contents())
    one = racer("zero2")
    assert one.said() == "plan"
    for _ in range(until):
        assert one.answer() == "make"
    if until == 2:
        export("plain", 100)
    one.process.kill()
    one.process.wait()
    assert FILE.read_text(encoding="utf-8") == SWITCHED
    shown = switch.switch(SwitchOptions("flowers", "zero2", dry_run=True))
    assert shown.startswith("done already: " if until == 2 else f"{FILE}: a `zerotrain switch` to ")
    said = switch.switch(SwitchOptions("flowers", "zero2"))
    assert said.startswith(
        "done already: plain ended at step 100, plain-zero2 continues to 300"
        if until == 2
        else "plain: ends at step 100 (was 300), exported; plain-zero2 continues to 300 under "
        "zero2. "
    )
    assert FILE.read_text(encoding="utf-8") == SWITCHED
    completed = (
        f"{FILE}: a `zerotrain switch` to zero2 was killed before its end; it is completed\n"
    )
    assert capfd.readouterr().err == (completed if until == 1 else "")
    assert set(contents()) == former
    assert switch.switch(SwitchOptions("flowers", "zero2")).startswith("done already: ")


@pytest.mark.slow
def test_another_switch_undoes_a_killed_one(snakemake, racer) -> None:
    """What was edited since stays."""
    one = racer("zero2")
    assert [one.said(), one.answer()] == ["plan", "make"]
    one.process.kill()
    one.process.wait()
    edit("run: flowers", "# mine\nrun: flowers")
    switch.switch(SwitchOptions("flowers", "zero1", name="next"))
    assert FILE.read_text(encoding="utf-8") == "# mine\n" + SWITCHED.replace(
        "plain-zero2", "next"
    ).replace("launch: zero2,", "launch: zero1,")


@pytest.mark.slow
def test_a_killed_switch_that_cannot_be_undone_is_left(snakemake, racer) -> None:
    """Its new phase was edited: a person decides."""
    one = racer("zero2")
    assert [one.said(), one.answer()] == ["plan", "make"]
    one.process.kill()
    one.process.wait()
    edit("launch: zero2, global_batch_size: 4", "launch: zero2, global_batch_size: 8")
    former = contents()
    with pytest.raises(PipelineError) as caught:
        switch.switch(SwitchOptions("flowers", "zero1"))
    assert "was killed before its end, and cannot be undone: " in caught.value.what
    assert contents() == former


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "calls"), [(signal.SIGTERM, 0), (signal.SIGHUP, 1), (signal.SIGINT, 1)]
)
def test_a_signal_leaves_nothing_in_the_folder(saved, racer, number, calls) -> None:
    """While it plans, and after its edit."""
    former = contents()
    one = racer("zero2")
    assert one.said() == "plan"
    for _ in range(calls):
        assert one.answer() == "make"
    one.process.send_signal(number)
    assert one.process.wait(60) == 128 + number
    assert contents() == former
    assert [path.name for path in Path("results/flowers/.switch").glob("*new*")] == []


def test_what_a_killed_switch_left_is_removed(snakemake) -> None:
    """A draft of a dead process; that of one that lives stays."""
    host = socket.gethostname().replace(".", "_")
    dead = FILE.with_name(f".{FILE.name}.new-{host}-{DEAD_PID}")
    alive = FILE.with_name(f".{FILE.name}.new-{host}-{os.getppid()}")
    dead.write_text("")
    alive.write_text("")
    switch.switch(SwitchOptions("flowers", "zero2"))
    assert not dead.exists()
    assert alive.exists()


@pytest.fixture
def unwritable(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """Makes the configuration one that cannot be written; the test is skipped where it cannot."""
    undo: list[list[str]] = []

    def call(*words: str) -> None:
        if subprocess.run(words, stderr=subprocess.DEVNULL).returncode:
            pytest.skip(f"`{words[0]}` is not possible here")

    def make(how: str) -> None:
        if how == "immutable":
            call("chattr", "+i", str(FILE))
            undo.append(["chattr", "-i", str(FILE.resolve())])
            return
        content = FILE.read_bytes()
        call("mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=3", "tmpfs", "config")
        undo.append(["umount", "-l", str(FILE.parent.resolve())])
        FILE.write_bytes(content)
        if how == "read-only":
            call("mount", "-o", "remount,ro", str(FILE.parent.resolve()))

    yield make
    for words in undo:
        subprocess.run(words, check=True)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("immutable", "Operation not permitted"),
        ("read-only", "Read-only file system"),
        ("full", "No space left on device"),
    ],
)
def test_a_configuration_that_cannot_be_written_stops_nothing(
    saved, unwritable, monkeypatch, how, why
) -> None:
    """It is noticed before the training is asked to stop."""
    monkeypatch.setattr(switch_plan, "PRESETS", Path("presets"))
    Path("config/launch").rename("presets")
    unwritable(how)
    with start_training(saved) as child:
        error = refused(switch.switch, SwitchOptions(str(FILE), "zero2"))
        assert error.what.startswith(f"{FILE}: cannot be written: {why}")
        assert "run the same command again" in error.hint
        assert child.poll() is None
        assert not (saved / "stop").exists()
        (saved / "stop").touch()
    assert FILE.read_text(encoding="utf-8") == CONFIG


def test_an_undo_that_fails_says_what_is_there(snakemake, monkeypatch) -> None:
    """And the lines to write by hand."""
    from zerotrain.artifact import whole_file

    def make(call: int) -> None:
        def refuse(*_: object) -> bool:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(whole_file, "_swap", refuse)
        raise PipelineError("it failed", hint="none")

    snakemake(make=make)
    assert refused(switch.switch, SwitchOptions("flowers", "zero2")).what == (
        f"it failed; {FILE} could not be restored ({FILE}: cannot be written: Read-only file "
        "system): it has the switch; to undo it, remove the phase plain-zero2, and give plain the "
        "lines that it had:\n      - {name: plain, until: 300, launch: torch, global_batch_size: 4}"
    )
    assert FILE.read_text(encoding="utf-8") == SWITCHED


def test_results_that_cannot_be_written_are_named(snakemake, monkeypatch) -> None:
    """In one sentence, and nothing has changed."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(switch, "open_to_change", refuse)
    with pytest.raises(PipelineError) as caught:
        switch.switch(SwitchOptions("flowers", "zero2"))
    assert caught.value.what == "results/flowers/.switch: cannot be written: Read-only file system"
    assert FILE.read_text(encoding="utf-8") == CONFIG
