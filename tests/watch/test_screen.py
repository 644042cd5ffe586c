"""A run's state fits any terminal, is plain in a pipe, and watching leaves the training alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len
from tests.builders.commands import run_zerotrain
from tests.builders.terminals import OTHER_SCREEN, OWN_SCREEN, Terminal, start_stand_in
from tests.builders.watched_runs import WatchedRun

from zerotrain.errors import PipelineError
from zerotrain.machine.processes import this_process
from zerotrain.run import stages
from zerotrain.run.watch import command, screen
from zerotrain.run.watch.screen import Canvas, describe, describe_changes, draw
from zerotrain.run.watch.state import RunState, read_run_state

FOREIGN = "a\x1b]0;owned\x07b\x1b[2Jc\x9b2Jd\r\n\te"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedRun:
    """A run that trains its second phase; no Slurm answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "jobs_here", lambda folder: [])
    found = WatchedRun()
    found.make_data()
    found.finish("plain", 300)
    found.make(found.folder.phase("offload").launch)
    log = found.log("offload", *range(10, 301, 10), of="plain")
    found.log("offload", *range(310, 501, 10))
    samples = log.parent / "samples"
    samples.mkdir()
    (samples / "step-00000500.png").touch()
    return found


@pytest.fixture
def state(run: WatchedRun) -> RunState:
    """Its state."""
    run.lock("offload")
    return read_run_state("digits")


def drawn(state: RunState, *size: int, unicode: bool = True) -> list[str]:
    """The lines of a drawing."""
    return draw(state, Canvas(*size, unicode=unicode)).plain.split("\n")


def test_all_fits_a_small_terminal(state: RunState) -> None:
    """80x24: stages with states, position, curve, figures and the newest sample."""
    lines = drawn(state, 80, 24)
    assert len(lines) == 24
    assert max(map(cell_len, lines)) <= 80
    assert lines[0] == "digits  running  config/digits.yaml"
    assert lines[1].split() == ["dataset", "✔", "base", "✔", "cache", "32", "✔"]
    assert lines[3].split() == ["offload", "launch", "✔", "train", "▶", "export", "·",
                                "evaluate", "·"]  # fmt: skip
    assert lines[6].startswith("offload zero2_offload  step 500 of 700  ━")
    assert lines[7].startswith("0.1000 ")
    assert set("".join(lines[8:17])) & {chr(code) for code in range(0x2801, 0x2900)}
    assert lines[18].split() == ["|plain", "10", "|offload", "300", "500"]
    assert lines[19] == "loss 0.0020, grad_norm 0.5000, lr 1.00e-03, epoch 5.00"
    assert lines[20].startswith("10.00 steps/s, 320 samples/s, 0:20 left, 0:50 trained, until ")
    assert lines[21:] == [
        "backward 60%, forward 30%, data 10%",
        "host memory 1.0 GiB",
        "sample results/digits/offload/progress/samples/step-00000500.png",
    ]


@pytest.mark.parametrize("size", [(40, 24), (20, 10), (10, 4), (200, 60)])
@pytest.mark.parametrize("unicode", [True, False])
def test_every_size_is_kept(state: RunState, size: tuple[int, int], unicode: bool) -> None:
    """Less is shown; no drawing has more lines than the terminal, and without UTF-8 it is ASCII."""
    lines = drawn(state, *size, unicode=unicode)
    assert len(lines) <= size[1]
    assert lines[0].startswith("digits  running")
    assert unicode or "".join(lines).isascii()


def test_many_phases_are_counted(run: WatchedRun) -> None:
    """Those around the current one are shown."""
    many = WatchedRun("many", tuple((f"p{n}", n * 10, "torch") for n in range(1, 11)))
    many.log("p6", 51)
    lines = drawn(read_run_state("many"), 80, 24)
    assert [line.split()[0] for line in lines[2:8]] == ["4", "p5", "p6", "p7", "p8", "2"]
    assert lines[2] == "4 earlier phases"


def test_foreign_text_commands_no_terminal(state: RunState) -> None:
    """Control characters of names, of a failed stage's message and of a sample's path are shown."""
    foreign = replace(
        state,
        run=FOREIGN, config=FOREIGN, problem=FOREIGN, sample=FOREIGN,
        stages=tuple(replace(one, state="failed", detail=FOREIGN) for one in state.stages),
        training=replace(state.training, phase=FOREIGN, preset=FOREIGN, still=FOREIGN),
        phase_starts=((10, FOREIGN),),
    )  # fmt: skip
    texts = ["\n".join(drawn(foreign, 500)), describe(foreign), *describe_changes(state, foreign)]
    for text in texts:
        assert not {char for char in text if not char.isprintable()} - {"\n"}
    assert r"a\x1b]0;owned\x07b\x1b[2Jc\x9b2Jd  e" in texts[0]


def test_lines_of_a_pipe(state: RunState) -> None:
    """One for each stage that changed, then one with position, loss, pace and time left."""
    assert describe(state) == (
        "digits: running, train offload, step 500 of 700, loss 0.0020, 10.00 steps/s, 0:20 left"
    )
    queued = replace(state.stages[8], state="queued", job="17", detail="Priority")
    later = replace(state, state="queued", stages=(*state.stages[:8], queued, *state.stages[9:]))
    assert describe_changes(state, later) == ["digits: train offload: queued (job 17, Priority)"]
    assert describe(later).startswith("digits: queued, queued train offload (job 17, Priority), ")


def test_a_curve_shows_where_the_loss_was() -> None:
    """From the top left to the bottom right; far apart values on a logarithmic axis."""
    line = [(step, 9.0 - step) for step in range(9)]
    assert screen.draw_curve(line, 20, 3, braille=False) == [
        "9.0000 *****        ",
        "           ******   ",
        "1.0000          ****",
    ]
    assert [
        row.replace("\u2800", " ").rstrip() for row in screen.draw_curve(line, 20, 3, braille=True)
    ] == ["9.0000 ⠉⠓⠦⣄⡀", "           ⠉⠙⠲⠤⣄⡀", "1.0000          ⠉⠓⠦⣄"]
    falling = [(step, 10.0**-step) for step in range(5)]
    assert screen.draw_curve(falling, 40, 4, braille=False)[1].split()[0] == "log"
    assert screen.draw_curve(falling[:1], 40, 4, braille=True) == []


def test_a_terminal_and_ctrl_c(run: WatchedRun) -> None:
    """80x24 in a real terminal: the drawing follows the files, Ctrl-C gives the own screen back
    with code 130, and the training's process and folder are as they were."""
    trainer = start_stand_in(Path())
    try:
        owner = replace(
            this_process(), pid=trainer.pid, started=psutil.Process(trainer.pid).create_time()
        )
        progress = run.lock("offload", owner)
        terminal = Terminal("watch", "digits", "--interval", "0.2")
        terminal.wait_for(lambda text: "step 500 of 700" in text)
        run.log("offload", 600)
        files = sorted(progress.rglob("*"))
        terminal.wait_for(lambda text: "step 600 of 700" in text)
        terminal.type(b"\x03")
        assert terminal.end() == 130
        for lines in terminal.screens():
            assert len(lines) <= 24
            assert max(cell_len(line.replace("^C", "")) for line in lines) <= 80  # echoed
        assert terminal.screens()[-1][0].rstrip() == "digits  running  config/digits.yaml"
        assert terminal.output.rindex(OWN_SCREEN) > terminal.output.rindex(OTHER_SCREEN)
        assert "digits: no longer watched; the run itself is as it was" in terminal.output
        assert trainer.poll() is None
        assert sorted(progress.rglob("*")) == files
    finally:
        trainer.kill()
        trainer.wait()


def test_a_pipe_to_the_end(run: WatchedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run is printed once, with code 0 and without control characters; once, and as
    JSON, it is the same state."""
    run.finish("offload", 700)
    run.make(run.folder.report)
    done = run_zerotrain("watch")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "digits: finished, offload step 500 of 700, loss 0.0020, 10.00 steps/s\n"
    assert command.watch(None, None, once=False, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_a_pipe_follows_a_training(run: WatchedRun) -> None:
    """A line as soon as the files change, in plain text; the end of the run is its last."""
    trainer = start_stand_in(Path())
    watch = subprocess.Popen(
        [sys.executable, "-m", "zerotrain", "watch", "digits", "--interval", "0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        started = psutil.Process(trainer.pid).create_time()
        progress = run.lock("offload", replace(this_process(), pid=trainer.pid, started=started))
        assert watch.stdout is not None
        lines = [watch.stdout.readline()]
        run.log("offload", 600)
        lines.append(watch.stdout.readline())
        run.finish("offload", 700)
        run.make(run.folder.report)
        (progress / "lock").unlink()
        lines += watch.stdout.read().splitlines(keepends=True)
        assert watch.wait(60) == 0
        assert lines[:2] == [
            f"digits: running, train offload, step {step} of 700, loss {1 / step:.4f}, "
            f"10.00 steps/s, 0:{(700 - step) // 10} left\n"
            for step in (500, 600)
        ]
        assert (
            lines[-1] == "digits: finished, offload step 600 of 700, loss 0.0017, 10.00 steps/s\n"
        )
        assert all(one.rstrip("\n").isprintable() for one in lines)
        assert trainer.poll() is None
    finally:
        for process in (trainer, watch):
            process.kill()
            process.wait()


def test_a_watch_waits_for_a_run_that_is_about_to_start(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make train` checks first, then Snakemake plans: the first look finds the run stopped."""

    def start(seconds: float) -> None:
        run.finish("offload", 700)
        run.make(run.folder.report)

    monkeypatch.setattr(command.time, "sleep", start)
    assert command.watch("digits", 0.1, once=False, as_json=False) == 0
    lines = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert (lines[0], lines[-1]) == ("digits: stopped", "digits: finished")


def test_how_a_watch_ends(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With code 1 if nothing runs the training on; of several that train there is a list."""
    monkeypatch.setattr(command, "SETTLE_SECONDS", 0.2)
    assert command.watch("digits", 0.1, once=False, as_json=False) == 1
    assert capsys.readouterr().out.startswith("digits: stopped, offload step 500 of 700, ")
    run.lock("offload")
    other = WatchedRun("other")
    other.lock("plain")
    assert command.watch(None, None, once=False, as_json=False) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "digits", "other", "one of them",
    ]  # fmt: skip
    with pytest.raises(PipelineError, match="no file in config has the run nowhere"):
        command.watch("nowhere", None, once=True, as_json=False)


def test_a_watch_of_a_trained_run_ends_with_code_0(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once nothing has worked on it for a while; the drawing says how to evaluate it."""
    monkeypatch.setattr(command, "SETTLE_SECONDS", 0.2)
    run.finish("offload", 700)
    assert command.watch("digits", 0.1, once=False, as_json=False) == 0
    assert capsys.readouterr().out.startswith("digits: trained, offload step 500 of 700, ")
    assert drawn(read_run_state("digits"), 80)[-1].startswith("to continue: snakemake ")
