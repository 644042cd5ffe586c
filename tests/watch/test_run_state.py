"""The state of a run is read from its files alone, and only what is new of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders.watched_runs import WatchedRun

from zerotrain.pipeline.cluster.slurm import SubmittedJob, parse_jobs
from zerotrain.pipeline.snakemake_runs import RUNS, Run
from zerotrain.pipeline.watch import metrics, stages
from zerotrain.pipeline.watch.metrics import MetricsTail
from zerotrain.pipeline.watch.runs import choose_runs, run_named
from zerotrain.pipeline.watch.state import RunReader, RunState, read_run_state
from zerotrain.training.process.lock_owner import this_process


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedRun:
    """A run of two phases, of which nothing was made yet; no Slurm answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "jobs_here", lambda folder: [])
    return WatchedRun()


def states(state: RunState) -> dict[str, str]:
    """The states of the stages by name; those of a phase have its name before them."""
    return {
        f"{stage.phase} {stage.name}" if stage.phase else stage.name: stage.state
        for stage in state.stages
    }


def work_on(run: str) -> None:
    """Record this process as a Snakemake that plans a run."""
    RUNS.mkdir(parents=True, exist_ok=True)
    Run(RUNS / "here.json", this_process(), local=True, supervisor=0).write()


def test_a_run_that_trains(run: WatchedRun) -> None:
    """Its lock has a live owner: position, pace, time left, time split and memory of its phase;
    what comes after it waits, also where an earlier training has left it."""
    run.make_data()
    run.finish("plain", 300)
    run.make(run.folder.phase("offload").launch)
    run.make(run.folder.phase("offload").weights)
    run.log("offload", 310, 320, 330)
    run.lock("offload")
    found = read_run_state("digits")
    assert found.state == "running"
    assert states(found) == {
        "dataset": "done", "base": "done", "cache 32": "done",
        "plain launch": "done", "plain train": "done", "plain export": "done",
        "plain evaluate": "done", "offload launch": "done", "offload train": "running",
        "offload export": "waiting", "offload evaluate": "waiting", "report": "waiting",
    }  # fmt: skip
    training = found.training
    assert training is not None
    assert (training.phase, training.preset) == ("offload", "zero2_offload")
    assert (training.step, training.until_step) == (330, 700)
    assert training.steps_per_second == pytest.approx(10.0)
    assert training.seconds_left == pytest.approx(37.0)
    assert training.time_split == pytest.approx({"backward": 0.6, "forward": 0.3, "data": 0.1})
    assert (training.host_bytes, training.device_bytes) == (2**30, 0)
    assert found.loss == ((310, 1 / 310), (320, 1 / 320), (330, 1 / 330))
    assert json.loads(json.dumps(found.as_json()))["training"]["step"] == 330


def test_a_finished_run(run: WatchedRun) -> None:
    """Everything is published; an `until` that was raised since is not trained."""
    run.make_data()
    run.finish("plain", 300)
    run.finish("offload", 700)
    run.make(run.folder.report)
    assert read_run_state("digits").state == "finished"
    run.file.write_text(run.file.read_text().replace("until: 700", "until: 900"))
    found = read_run_state("digits")
    assert found.state == "stopped"
    assert states(found)["offload train"] == "waiting"
    assert states(found)["report"] == "waiting"


@pytest.mark.parametrize(
    ("record", "state", "detail"),
    [
        ({"code": 85, "reason": "SIGTERM"}, "stopped", "SIGTERM"),
        ({"code": 2, "reason": "out of memory"}, "failed", "out of memory"),
        (None, "failed", "killed: pid 999999 on "),
    ],
)
def test_how_a_training_ended(
    run: WatchedRun, record: dict[str, Any] | None, state: str, detail: str
) -> None:
    """Asked to stop, failed, or killed: then its lock is left, and its owner is gone."""
    run.make_data()
    run.make(run.folder.phase("plain").launch)
    progress = run.lock("plain", replace(this_process(), pid=999999, started=1.0))
    if record:
        (progress / "exit.json").write_text(json.dumps(record))
    found = read_run_state("digits")
    assert found.state == state
    [train] = [one for one in found.stages if (one.name, one.phase) == ("train", "plain")]
    assert train.state == state
    assert train.detail.startswith(detail)


def test_a_stage_that_snakemake_runs(run: WatchedRun) -> None:
    """Its log is newer than the Snakemake; with an error at its end it has failed, and an older
    log is that of an earlier attempt."""
    work_on("digits")
    log = run.write_stage_log("prepare_dataset", "reading\n")
    assert states(read_run_state("digits"))["dataset"] == "running"
    log.write_text("reading\nERROR: photos: no such folder\n  Hint: name one\n")
    found = read_run_state("digits")
    assert (found.stages[0].state, found.stages[0].detail) == ("failed", "photos: no such folder")
    os.utime(log, (1, 1))
    found = read_run_state("digits")
    assert (found.state, found.stages[0].state) == ("running", "waiting")


@pytest.mark.parametrize(("words", "state"), [(["train"], "running"), (["-n", "train"], "stopped")])
def test_a_snakemake_that_has_recorded_nothing_yet(
    run: WatchedRun, words: list[str], state: str
) -> None:
    """While it starts and plans, its run is at work and is the one that is watched; a dry run
    starts nothing, nor does the Snakemake of another folder or run."""
    run.finish("plain", 300)
    other = WatchedRun("other")
    other.finish("plain", 300)
    script = "import time\nprint(flush=True)\ntime.sleep(60)\n"
    Path("snakemake").write_text(script, encoding="utf-8")
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    command = [sys.executable, os.path.abspath("snakemake"), *words, "--configfile"]
    with (
        subprocess.Popen([*command, str(run.file)], stdout=subprocess.PIPE) as one,
        subprocess.Popen(
            [*command, os.path.abspath(other.file)], stdout=subprocess.PIPE, cwd=elsewhere
        ) as two,
    ):
        try:
            assert one.stdout is not None
            assert two.stdout is not None
            assert (one.stdout.readline(), two.stdout.readline()) == (b"\n", b"\n")
            assert read_run_state("digits").state == state
            assert read_run_state("other").state == "stopped"
            assert choose_runs() == (["digits"] if state == "running" else ["other"])
        finally:
            one.kill()
            two.kill()
    assert read_run_state("digits").state == "stopped"


def test_a_job_in_the_queue(run: WatchedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits under its id, with Slurm's reason, and runs once Slurm runs it."""
    run.make_data()
    run.make(run.folder.phase("plain").launch)
    jobs = [
        SubmittedJob("17", "PENDING", "Priority", "train_phase", "plain"),
        SubmittedJob("18", "PENDING", "Priority", "train_phase", "other_plain"),
    ]
    monkeypatch.setattr(stages, "jobs_here", lambda folder: jobs)
    found = read_run_state("digits")
    [train] = [one for one in found.stages if (one.name, one.phase) == ("train", "plain")]
    assert (found.state, train.state, train.job, train.detail) == (
        "queued", "queued", "17", "Priority",
    )  # fmt: skip
    jobs[0] = replace(jobs[0], state="RUNNING")
    assert states(read_run_state("digits"))["plain train"] == "running"


def test_jobs_of_this_folder(tmp_path: Path) -> None:
    """By the executor's comment; a comment may contain the separator."""
    text = (
        f"17|PENDING|Priority|{tmp_path}|rule_train_phase_wildcards_plain\n"
        f"18|RUNNING|None|{tmp_path}|rule_report\n"
        f"19|RUNNING|None|{tmp_path.parent}|rule_report\n"
        f"20|RUNNING|None|{tmp_path}|(null)\n21|RUNNING\n"
    )
    assert parse_jobs(text, tmp_path) == [
        SubmittedJob("17", "PENDING", "Priority", "train_phase", "plain"),
        SubmittedJob("18", "RUNNING", "None", "report", ""),
    ]


def test_a_broken_configuration_hides_no_run(run: WatchedRun) -> None:
    """What trains is shown from the folders, with the reason."""
    run.make_data()
    run.make(run.folder.phase("plain").launch)
    run.log("plain", 10)
    run.lock("plain")
    run.file.write_text("run: digits\nphases: [\n")
    found = read_run_state("digits", run.file)
    assert found.problem.startswith("config/digits.yaml: ")
    assert states(found)["plain train"] == "running"
    assert found.training is not None
    assert found.training.step == 10


def test_only_new_lines_are_read(run: WatchedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is read once it is whole; a log that starts again is read again."""
    path, tail = run.log("plain", 1, 2), MetricsTail()
    tail.read(path)
    read: list[bytes] = []
    monkeypatch.setattr(tail, "_add", lambda line, add=tail._add: (read.append(line), add(line)))
    with path.open("a") as stream:
        stream.write('{"phase": "plain", "step": 3, ')
    tail.read(path)
    assert read == []
    with path.open("a") as stream:
        stream.write('"loss": 0.25}\n')
    tail.read(path)
    assert (len(read), tail.newest["step"]) == (1, 3)
    path.write_text("")
    run.log("plain", 5)
    tail.read(path)
    assert tail.loss.points == [(5, 0.2)]


def test_a_long_log_is_sampled(run: WatchedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end as a whole, some lines of the rest; the curve keeps few points over all steps."""
    monkeypatch.setattr(metrics, "WHOLE_BYTES", 2**17)
    monkeypatch.setattr(metrics, "TAIL_BYTES", 2**14)
    path, tail = run.log("plain", *range(1, 1001)), MetricsTail()
    tail.read(path)
    steps = [step for step, _ in tail.loss.points]
    assert (steps[0], steps[-1]) == (1, 1000)
    assert 300 < len(steps) < 600
    assert steps == sorted(set(steps))
    assert steps[-20:] == list(range(981, 1001))
    curve = metrics.Curve()
    for step in range(1, 10_001):
        curve.add(step, float(step))
    assert len(curve.points) <= metrics.MOST_POINTS
    assert curve.points[-1] == (10_000, 9996.5)
    assert curve.points[0] == (8, 4.5)


def test_broken_lines_are_left_out(run: WatchedRun) -> None:
    """Lines that are no objects, values that are no numbers."""
    path = run.log("plain", 1)
    with path.open("a") as stream:
        stream.write('[]\nnull\n{"step": "x"}\n{"phase": "plain", "step": 2, "loss": null}\n\xff\n')
        stream.write(
            '{"phase": "plain", "step": 3, "loss": "x", "seconds": {}, "seconds_data": []}\n'
        )
    found = read_run_state("digits")
    assert found.loss == ((1, 1.0),)
    assert found.training is not None
    assert (found.training.step, found.training.loss) == (3, None)


def test_the_run_that_is_meant(run: WatchedRun) -> None:
    """The one that trains; else the newest; a name or a configuration file."""
    run.log("plain", 1)
    later = WatchedRun("later")
    path = later.log("plain", 1)
    os.utime(path, (2**32, 2**32))
    assert choose_runs() == ["later"]
    run.lock("plain")
    assert choose_runs() == ["digits"]
    later.lock("plain")
    assert choose_runs() == ["digits", "later"]
    assert run_named("later") == ("later", None)
    assert run_named("config/later.yaml") == ("later", Path("config/later.yaml"))


def test_a_reader_needs_no_torch() -> None:
    """The command answers at once, also on a login node."""
    code = (
        "import sys, zerotrain.pipeline.watch.state, zerotrain.pipeline.watch.runs\n"
        "print([name for name in ('torch', 'snakemake', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_reader_stays_in_step(run: WatchedRun) -> None:
    """The same reader sees what is made, trained and published after its first call."""
    reader = RunReader("digits")
    assert reader.read().state == "waiting"
    run.make_data()
    run.make(run.folder.phase("plain").launch)
    run.lock("plain")
    assert states(reader.read())["plain train"] == "running"
    run.log("plain", 150)
    assert reader.read().training.step == 150  # type: ignore[union-attr]
    (run.folder.phase("plain").progress / "lock").unlink()
    run.finish("plain", 300)
    run.finish("offload", 700)
    run.make(run.folder.report)
    assert reader.read().state == "finished"
