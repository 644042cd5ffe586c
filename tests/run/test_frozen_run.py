"""What people see of a run, text for text: the report, `compare`, `watch` and the live page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from starlette.testclient import TestClient
from tests.builders.compared import make_log
from tests.builders.reported import RUN, launched
from tests.builders.watched_runs import WatchedRun
from typer.testing import CliRunner

from zerotrain import artifact, cli
from zerotrain.builder.app import create_app
from zerotrain.builder.pages import BuilderSettings
from zerotrain.config.read import read_config
from zerotrain.evaluation.images import draw_grid
from zerotrain.run.watch.screen import Canvas, draw
from zerotrain.run.watch.state import read_run_state
from zerotrain.stages import report

GOLDEN = Path(__file__).parents[1] / "golden/run"
PLAIN = make_log("plain", 0, [1.0, 0.9, 0.7, 0.8, 0.6])
OFFLOAD = make_log("offload", 50, [0.9, 0.55, 0.5, 0.45])
METRICS = {"step": 50, "val_loss": 0.5, "train_seconds": 25.0, "forward_seconds": 20.0,
           "backward_seconds": 5.0, "peak_host_bytes": 2**30}  # fmt: skip
Hold = Callable[[Path, str], None]


def write_log(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Write a log into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    more = {"grad_norm": 0.5, "samples_per_second": 8.0, "host_bytes": 2**30, "device_bytes": 0}
    text = "".join(json.dumps({**line, **more}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture(autouse=True)
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose first phase is finished, and whose second one was asked to stop."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(report, "compare_forecasts", lambda *_, **__: "No forecast.")
    run = WatchedRun()
    phases = [{"name": "plain", "until": 50}, {"name": "offload", "until": 100}]
    run.file.write_text(yaml.safe_dump({**RUN, "phases": phases}), encoding="utf-8")
    run.make_data()
    config = read_config(run.file)
    plain, offload = run.folder.phase("plain"), run.folder.phase("offload")
    for phase in (plain, offload):
        launched(phase.path, config)
    run.make(plain.checkpoint, until=50)
    engine = {"preset": "zero2", "engine": "deepspeed", "zero_stage": 2, "world_size": 1}
    with artifact.publish(plain.state, "state", made_by={"engine": engine}) as draft:
        write_log(draft.folder / "records", PLAIN)
    run.make(plain.weights, step=50, ema=True)
    with artifact.publish(plain.evaluation, "evaluation") as draft:
        pictures = [[Image.new("RGB", (64, 64), "red")]]
        draw_grid(["a cat"], pictures).save(draft.folder / "grid.png")
        draft.content = {"prompts": ["a cat"], "evaluate": {}}
    (plain.path / "metrics.json").write_text(json.dumps(METRICS), encoding="utf-8")
    write_log(offload.progress, [*PLAIN, *OFFLOAD])
    ended = {"code": 85, "reason": "offload: unfinished: SIGTERM at step 90 of 100"}
    (offload.progress / "exit.json").write_text(json.dumps(ended), encoding="utf-8")


def called(*words: str) -> str:
    """What a command prints, without blanks at the ends of lines."""
    done = CliRunner().invoke(cli.command_line(), words, catch_exceptions=False)
    return re.sub(r" +$", "", done.stdout, flags=re.MULTILINE)


def text_of(page: str) -> str:
    """The words of a page, a line each; pictures, days and digests are left out."""
    text = re.sub(r"(?s)<style.*?</style>|<[^>]*>", "\n", page)
    text = re.sub(r"\b[0-9a-f]{12}\b|\d{4}-\d\d-\d\d", "...", html.unescape(text))
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())


def test_the_report_of_a_frozen_run(generated: Hold) -> None:
    """All but the chapter about its origin, which lists every value of its launch."""
    called("report", "digits", "--output", "report.html")
    page = Path("report.html").read_text(encoding="utf-8")
    generated(GOLDEN / "report.txt", text_of(page.partition('id="origin"')[0]))


def test_the_comparison_of_its_phases(generated: Hold) -> None:
    generated(GOLDEN / "compare.txt", called("compare", "digits"))


def test_the_screen_of_watch(generated: Hold) -> None:
    drawing = draw(read_run_state("digits"), Canvas(100)).plain
    generated(GOLDEN / "watch.txt", f"{drawing}\n")


def test_the_live_page(generated: Hold) -> None:
    app = create_app(BuilderSettings(token="t"))
    with TestClient(app, base_url="http://127.0.0.1:8417") as client:
        client.get("/", params={"token": "t"})
        generated(GOLDEN / "live.txt", text_of(client.get("/runs/digits/live").text))
