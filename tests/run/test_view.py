"""One reader of a run: its state from its files alone, and only what is new of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders.processes import sleeping
from tests.builders.watched_runs import WatchedRun

from zerotrain import artifact
from zerotrain.errors import PipelineError
from zerotrain.machine.processes import this_process
from zerotrain.run import stages
from zerotrain.run.processes import SubmittedJob, parse_jobs
from zerotrain.run.runs import Place, choose_runs, find_place, runs_here
from zerotrain.run.view import RunView
from zerotrain.run.watch.state import RunState, read_run_state, read_state


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


def test_a_stage_runs_while_its_process_does(run: WatchedRun) -> None:
    """Without one, a log with an error at its end says that it failed; while a Snakemake works, an
    older log is that of an earlier attempt."""
    log = run.write_stage_log("prepare_dataset", "reading\n")
    assert states(read_run_state("digits"))["dataset"] == "waiting"
    with sleeping("zerotrain", "--log", str(log), "prepare_dataset", "--output", "x"):
        found = read_run_state("digits")
        assert (found.state, states(found)["dataset"]) == ("running", "running")
    log.write_text("reading\nERROR: photos: no such folder\n  Hint: name one\n")
    with sleeping("snakemake", "train", "--configfile", str(run.file)):
        found = read_run_state("digits")
        failed = found.stages[0]
        assert (failed.state, failed.detail) == ("failed", "photos: no such folder")
        os.utime(log, (1, 1))
        found = read_run_state("digits")
        assert (found.state, found.stages[0].state) == ("running", "waiting")
    found = read_run_state("digits")
    assert (found.state, found.stages[0].state) == ("failed", "failed")


def test_a_training_starts_before_it_has_its_lock(run: WatchedRun) -> None:
    run.make_data()
    run.make(run.folder.phase("plain").launch)
    log = run.write_stage_log("train_phase.plain", "")
    with sleeping("zerotrain", "--log", str(log), "train_phase", "--launch", "x"):
        [train] = [one for one in read_run_state("digits").stages if one.detail]
        assert (train.phase, train.name, train.state, train.detail) == (
            "plain", "train", "running", "starts",
        )  # fmt: skip


@pytest.mark.parametrize(("words", "state"), [(["train"], "running"), (["-n", "train"], "stopped")])
def test_a_run_is_at_work_while_its_snakemake_starts_and_plans(
    run: WatchedRun, words: list[str], state: str
) -> None:
    """It is the one that is watched; a dry run starts nothing, nor does the Snakemake of another
    folder or run."""
    run.finish("plain", 300)
    other = WatchedRun("other")
    other.finish("plain", 300)
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    with (
        sleeping("snakemake", *words, "--configfile", str(run.file)),
        sleeping("snakemake", "--configfile", os.path.abspath(other.file), folder=elsewhere),
    ):
        assert read_run_state("digits").state == state
        assert read_run_state("other").state == "stopped"
        assert choose_runs() == (["digits"] if state == "running" else ["other"])
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
    found = read_state(RunView("digits", run.file))
    assert found.problem.startswith("config/digits.yaml: ")
    assert states(found)["plain train"] == "running"
    assert found.training is not None
    assert found.training.step == 10


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


@pytest.mark.parametrize(
    ("word", "place"),
    [
        *((word, Place("digits")) for word in ("digits", "results/digits", "./results/digits/")),
        ("config/digits.yaml", Place("digits", file=Path("config/digits.yaml"))),
        *((word, Place("digits", ("plain",))) for word in ("digits/plain", "results/digits/plain")),
        ("results/digits/plain/launch/run.yaml", Place("digits", ("plain", "launch", "run.yaml"))),
        ("../results/digits", Place("digits", root=Path("../results"))),
        *((word, None) for word in ("data", "results/data/digits", ".", "results/..", "/models")),
    ],
)
def test_a_word_names_a_run_or_a_place_in_its_results(
    run: WatchedRun, word: str, place: Place | None
) -> None:
    """In one way in all commands, whether the place is there or not."""
    assert find_place(word) == place


def test_a_reader_needs_no_torch() -> None:
    """The command answers at once, also on a login node."""
    code = (
        "import sys, zerotrain.run.view, zerotrain.run.watch.state\n"
        "print([name for name in ('torch', 'snakemake', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_view_stays_in_step(run: WatchedRun) -> None:
    """The same reader sees what is made, trained and published after its first call."""
    view = RunView("digits")
    assert read_state(view).state == "waiting"
    run.make_data()
    run.make(run.folder.phase("plain").launch)
    run.lock("plain")
    assert states(read_state(view))["plain train"] == "running"
    run.log("plain", 150)
    assert read_state(view).training.step == 150  # type: ignore[union-attr]
    (run.folder.phase("plain").progress / "lock").unlink()
    run.finish("plain", 300)
    run.finish("offload", 700)
    run.make(run.folder.report)
    assert read_state(view).state == "finished"


def test_a_run_without_its_evaluations_is_trained(run: WatchedRun) -> None:
    """Also if its data are gone; while a Snakemake works on it, it runs; one phase is not all."""
    run.finish("plain", 300)
    assert RunView("digits").state == "stopped"
    run.finish("offload", 700)
    (run.folder.phase("offload").path / "metrics.json").unlink()
    assert RunView("digits").state == "trained"
    with sleeping("snakemake", "--configfile", str(run.file)):
        assert RunView("digits").state == "running"
    log = run.write_stage_log("evaluate.offload", "ERROR: no memory\n")
    assert RunView("digits").state == "failed"
    log.unlink()
    run.make_data()
    (run.folder.phase("offload").path / "metrics.json").write_text("{}")
    assert RunView("digits").state == "trained"
    run.make(run.folder.report)
    assert RunView("digits").state == "finished"


def test_a_recipe_that_never_ran_is_no_run(run: WatchedRun) -> None:
    """It waits, none of its phases has started, and it is in no list of runs."""
    view = RunView("digits")
    assert (view.state, view.started, view.later) == ("waiting", [], ["plain", "offload"])
    assert (runs_here(), view.current, view.curves.lines) == ([], None, [])
    run.make(run.folder.phase("plain").launch)
    view.look()
    assert (view.started, runs_here()) == ([], ["digits"])


def test_a_phase_has_one_state_for_all_readers(run: WatchedRun) -> None:
    """State, error, steps, end and newest checkpoint, from trained to stopped."""
    run.finish("plain", 300)
    run.finish("offload", 200)
    progress = run.lock("offload", replace(this_process(), pid=999999, started=1.0))
    for step in (100, 200):
        run.make(progress / f"step-{step:08d}")
    plain, offload = RunView("digits").phases
    assert (plain.state, plain.error, plain.until, plain.end) == ("trained", "", 300, 300)
    assert (plain.steps, plain.newest_rolling, plain.trainer) == ([], None, None)
    assert (offload.state, offload.until, offload.end) == ("failed", 700, 200)
    assert offload.error.startswith("killed: pid 999999")
    assert offload.steps == [100, 200]
    assert offload.newest_rolling == progress / "step-00000200"
    (progress / "exit.json").write_text('{"code": 85, "reason": "SIGTERM"}')
    [_, offload] = RunView("digits").phases
    assert (offload.state, offload.error) == ("stopped", "SIGTERM")


def test_a_value_stays_until_the_next_look(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read when it is asked for, and again only if its files have changed."""
    run.finish("plain", 300)
    read: list[Path] = []
    original = artifact.read

    def counted(folder: Path, *words: Any, **options: Any) -> artifact.Artifact:
        read.append(folder)
        return original(folder, *words, **options)

    monkeypatch.setattr(artifact, "read", counted)
    view = RunView("digits")
    plain = view.phases[0]
    assert read == []
    first = plain.weights
    assert (plain.weights is first, read) == (True, [plain.places.weights])
    view.look()
    assert (plain.weights is first, len(read)) == (True, 1)
    run.make(plain.places.weights, step=300, ema=True)
    assert (plain.weights is first, plain.averaged) == (True, False)
    view.look()
    assert (plain.averaged, len(read)) == (True, 2)
    assert view.phases[0] is plain


def test_curves_are_of_the_published_log_unless_it_trains_again(run: WatchedRun) -> None:
    """Whatever the files' times are: a copy may reverse them."""
    run.finish("plain", 300)
    state, progress = run.folder.phase("plain").state, run.log("plain", 10, 20, 30)
    view = RunView("digits")
    assert view.phases[0].log == progress
    (state / "records").mkdir()
    (state / "records/metrics.jsonl").write_text(progress.read_text().partition("\n")[0] + "\n")
    os.utime(state / "records/metrics.jsonl", (1, 1))
    view.look()
    assert view.phases[0].log == state / "records/metrics.jsonl"
    assert [line["step"] for line in view.curves.lines] == [10]
    run.lock("plain")
    view.look()
    assert view.phases[0].log == progress
    assert [line["step"] for line in view.curves.lines] == [10, 20, 30]
    assert (view.phases[0].step, view.phases[0].memory["host"]) == (30, 2**30)


def test_damage_is_an_error_where_it_is_asked_for(run: WatchedRun) -> None:
    """The rest of the phase is read."""
    run.finish("plain", 300)
    plain = RunView("digits").phases[0]
    (plain.folder / "metrics.json").unlink()
    with pytest.raises(PipelineError, match=r"metrics\.json: missing, so phase plain has not been"):
        _ = plain.costs
    (plain.places.checkpoint / "manifest.json").write_text("{")
    with pytest.raises(PipelineError, match=r"checkpoint/manifest\.json: not valid JSON"):
        _ = plain.end
    assert (plain.state, plain.is_exported) == ("trained", True)
