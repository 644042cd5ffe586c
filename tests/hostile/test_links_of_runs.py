"""A run from somebody else whose files are links: nothing writes through them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.builders.refusals import refusal
from tests.builders.watched_runs import WatchedRun
from tests.hostile.run_readers import RUN, write_run

from zerotrain.artifact.layout import RunFolder
from zerotrain.builder import processes
from zerotrain.builder.processes import SwitchChoice
from zerotrain.config.read import read_config
from zerotrain.graph import hooks
from zerotrain.graph.artifacts import Artifacts
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.runs import Runs
from zerotrain.graph.switch.command import switch

WRITTEN = (
    "stop", "logs/builder.train.log", "logs/builder.switch.log", "logs/builder.train.json",
    "plain/progress/stop", "plain/progress/ended-0.json", "plain/progress/exit.json",
    "plain/progress/tensorboard", "offload/progress/stop", "benchmarks/train_phase.plain.tsv",
    ".switch", ".switch/switch.json", "offload", "plain/metrics.csv",
)  # fmt: skip
"""What a training, Snakemake, trackers and the page write, also where the run has none yet."""
CONFIG = f"config/{RUN}.yaml"


def _write_finished(folder: Path) -> None:
    made = WatchedRun(RUN)
    made.make_data()
    made.finish("plain", 300)
    made.log("plain", 10, 300)
    made.lock("plain")
    made.write_stage_log("train_phase.plain", "step 300\n")
    (made.folder.base / "model.safetensors").symlink_to(folder / "victim")


@pytest.fixture(params=[_write_finished, write_run], ids=["finished", "half-finished"])
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> RunFolder:
    """A run in a project whose commands are stand-ins that write nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "_program", lambda words: [sys.executable, "-c", "", *words])
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config" / "launch").mkdir(parents=True)
    (tmp_path / "config" / "launch" / "zero2.yaml").touch()
    request.param(tmp_path)
    return RunFolder(RUN)


def _snakemake() -> None:
    """What Snakemake does before its first job."""
    runs = Runs({CONFIG: read_config(Path(CONFIG))})
    hooks.before_jobs(None, runs, Artifacts(runs))


ACTIONS: dict[str, Callable[[], object]] = {
    "start": lambda: processes.start(RUN),
    "stop": lambda: processes.stop(RUN),
    "switch": lambda: processes.switch(RUN, SwitchChoice("zero2"), then_start=False),
    "zerotrain switch": lambda: switch(SwitchOptions(run=RUN, to="zero2")),
}


def _digest(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def test_a_link_in_the_place_of_each_file_is_named_and_not_written_through(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By Snakemake before its jobs, by `zerotrain switch` and by each button of the page, whatever
    the link leads to: a file of the user, a folder, or nothing yet."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("mine")
    files = [path for path in run.path.rglob("*") if path.is_file()]
    own = [path for path in files if not path.is_relative_to(run.base)]
    assert len(own) > 8
    places = [*own, *(run.path / name for name in WRITTEN)]
    for number, place in enumerate(dict.fromkeys(places)):
        place.parent.mkdir(parents=True, exist_ok=True)
        kept = tmp_path / "kept"
        if existed := os.path.lexists(place):
            place.rename(kept)
        target = (outside / "victim", outside, outside / "new")[number % 3]
        place.symlink_to(target)
        before = _digest(tmp_path)
        for name, act in ACTIONS.items():
            assert f"{place}: a link that leads out of" in refusal(act), name
        with pytest.raises(SystemExit):
            _snakemake()
        assert f"{place}: a link that leads out of" in capsys.readouterr().err
        assert _digest(tmp_path) == before
        place.unlink()
        if existed:
            kept.rename(place)


@pytest.mark.parametrize("run", [_write_finished], indirect=True)
def test_a_run_on_a_larger_disk_is_started_and_stopped(run: RunFolder, tmp_path: Path) -> None:
    """The folder of the run itself may be a link, and those of its base are."""
    larger = tmp_path / "larger"
    run.path.rename(larger)
    run.path.symlink_to(larger)
    assert "was asked to stop" in str(processes.stop(RUN))
    assert (larger / "plain/progress/stop").is_file()
    processes.start(RUN)
    assert (larger / "logs/builder.train.log").is_file()


def test_snakemake_starts_no_job_of_a_half_finished_run_with_a_link(
    private_project: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself: its log of the run so far would go into a file of the user's."""
    project, victim = private_project("project"), tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.chdir(project)
    write_run(project)
    log = RunFolder(RUN).phase("offload").path / "progress" / "metrics.jsonl"
    log.unlink(missing_ok=True)
    log.symlink_to(victim)
    done = subprocess.run(["snakemake", "--cores", "1", "train"], capture_output=True, text=True)
    assert done.returncode != 0
    assert f"{log}: a link that leads out of" in done.stderr
    assert "Traceback" not in done.stderr
    assert victim.read_text() == "mine"
