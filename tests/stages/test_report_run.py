"""report by hand: a page about a run as far as it has come."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from tests.builders.phases import PRESETS
from tests.builders.reported import RUN, launched
from typer.testing import CliRunner

from zerotrain import artifact, cli
from zerotrain.config.read import read_config
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import Architecture
from zerotrain.launch.planner.trace_store import Activations, ModelShapes, TracedModel
from zerotrain.launch.planner.tracing import Tracer
from zerotrain.run.report.costs import UNKNOWN, compare_forecasts, measure_disk
from zerotrain.run.report.figures import Panel
from zerotrain.run.report.origin import lineage_table, walk_lineage
from zerotrain.run.view import RunView

MIB = 2**20
LOG = [{"phase": "plain", "step": step, "loss": 1.0 / step} for step in (1, 2)]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in a project; nothing has started."""
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    Path("config/cats.yaml").write_text(yaml.safe_dump(RUN), encoding="utf-8")
    return Path("results/digits")


def call(*words: str) -> str:
    """What the command prints."""
    done = CliRunner().invoke(cli.command_line(), ["report", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("name", ["digits", "config/cats.yaml"])
def test_a_run_that_still_trains_has_a_page(results: Path, name: str):
    """It says what is not there yet; no other file is written."""
    progress = results / "plain" / "progress"
    progress.mkdir(parents=True)
    (progress / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    before = {path for path in results.rglob("*")}
    assert call(name) == "report   results/digits/report.html\n"
    assert {path for path in results.rglob("*")} - before == {results / "report.html"}
    text = (results / "report.html").read_text()
    assert "Phase plain has not been evaluated." in text
    assert "Phase offload has not started." in text
    assert "training loss 1 in the first line of the log, 0.5 in the last" in text
    assert "--configfile config/cats.yaml" in text


@pytest.mark.parametrize(
    ("output", "written"), [("page.html", "page.html"), ("config", "config/index.html")]
)
def test_the_page_has_the_place_that_is_asked_for(results: Path, output: str, written: str):
    """A file, or index.html in a folder."""
    (results / "plain" / "progress").mkdir(parents=True)
    assert call("digits", "--output", output) == f"report   {written}\n"
    assert Path(written).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_run_that_has_not_started_is_refused(results: Path):
    with pytest.raises(PipelineError, match="no phase of the run digits has started") as caught:
        call("digits")
    assert "--configfile config/cats.yaml" in str(caught.value)


def test_a_page_is_about_one_run(results: Path):
    with pytest.raises(PipelineError, match="a page is about one run"):
        call("digits", "others")


def test_a_file_with_two_names_takes_its_bytes_once(tmp_path: Path):
    """A checkpoint is hard-linked from the newest rolling one; a cache counts apart from the
    dataset around it."""
    data, cache, checkpoint = (tmp_path / name for name in ("data", "data/cache", "checkpoint"))
    for folder in (cache, checkpoint, tmp_path / "progress/step-1"):
        folder.mkdir(parents=True)
    (data / "samples").write_bytes(b"x" * 5)
    (cache / "shard").write_bytes(b"x" * 7)
    (checkpoint / "rank").write_bytes(b"x" * 11)
    os.link(checkpoint / "rank", tmp_path / "progress/step-1/rank")
    (tmp_path / "progress/step-1/more").write_bytes(b"x" * 2)
    folders = {path.name: path for path in (data, cache, checkpoint, tmp_path / "progress")}
    taken = {one.name: (one.own, one.whole) for one in measure_disk(folders)}
    assert taken == {
        "data": (5, 5), "cache": (7, 7), "checkpoint": (11, 11), "progress": (2, 13),
    }  # fmt: skip


def test_lineage_names_parents_by_hash_and_what_has_changed(results: Path):
    """A parent comes before what was made of it; one that is gone has a row."""
    plain = results / "plain"
    with artifact.publish(Path("base"), "base") as draft:
        (draft.folder / "a").write_text("a")
    with artifact.publish(Path("gone"), "cache") as draft:
        (draft.folder / "b").write_text("b")
    base, gone = artifact.read(Path("base"), "base"), artifact.read(Path("gone"), "cache")
    with artifact.publish(
        plain / "checkpoint", "checkpoint", parents={"base": base, "cache": gone}
    ) as draft:
        (draft.folder / "c").write_text("c")
    (Path("gone") / "manifest.json").unlink()
    with artifact.publish(Path("base"), "base") as draft:
        (draft.folder / "a").write_text("other")
    rows = lineage_table(walk_lineage(RunView("digits", folders=[plain]))).rows
    now = artifact.read(Path("base"), "base").identity[:12]
    assert [row[:3] for row in rows[:2]] == [["base", "base", now], ["gone", "not here", ""]]
    assert rows[2][3] == (
        f"base {base.identity[:12]} (it has changed since), cache {gone.identity[:12]}"
    )


@pytest.fixture
def measured(results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An evaluated phase with its launch and its state."""
    plain = results / "plain"
    launched(plain, read_config(Path("config/cats.yaml")))
    with artifact.publish(plain / "evaluation", "evaluation") as draft:
        draft.content = {"prompts": []}
    (plain / "metrics.json").write_text(json.dumps({"train_host_total_peak_bytes": 600 * MIB}))
    (plain / "state").mkdir()
    (plain / "state" / "master-00000.safetensors").write_bytes(bytes(2 * 3 * 4 * 2**18))
    (Path("config") / "launch").mkdir()
    for file in PRESETS.glob("*.yaml"):
        (Path("config/launch") / file.name).write_text(file.read_text())
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").resolve()))
    return plain


def test_the_forecast_is_next_to_what_was_measured(measured: Path, monkeypatch: pytest.MonkeyPatch):
    """Host memory has no ratio: what was measured has the libraries as well."""
    shape = {"w": (512, 512)}  # 1 MiB
    model = ModelShapes(Architecture("sdxl", "nano", {}), shape, ("w",))
    activations = Activations(*[MIB] * 7, 1, 1, *[1] * 3)
    monkeypatch.setattr(
        Tracer, "trace", lambda *_, **__: TracedModel(model, {"torch": activations})
    )
    config = read_config(Path("config/cats.yaml"))
    facts = RunView("digits", folders=[measured])
    panel = compare_forecasts(facts, {"plain": config}, None, trace=False)
    assert isinstance(panel, Panel)
    assert panel.table is not None
    rows = {row[0]: list(row[1:]) for row in panel.table.rows}
    assert rows["plain, state on disk"] == ["3.0 MiB", "6.0 MiB", "2.00"]
    assert rows["plain, memory"][1:] == ["600.0 MiB", ""]


def test_a_forecast_is_only_traced_by_hand(measured: Path, capsys: pytest.CaptureFixture[str]):
    """The rule's page reads what has been traced, builds no model and prints nothing about it."""
    config = read_config(Path("config/cats.yaml"))
    facts = RunView("digits", folders=[measured])
    assert compare_forecasts(facts, {"plain": config}, None, trace=False) == UNKNOWN
    assert capsys.readouterr() == ("", "")
