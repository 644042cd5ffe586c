"""report: one page that needs nothing else."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from zerotrain import artifact
from zerotrain.config import RunConfig, parse_config
from zerotrain.errors import PipelineError
from zerotrain.stages.report import report


class Page(HTMLParser):
    """Text and references of a page; every element that opens must close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def config() -> RunConfig:
    raw = {
        "run": "digits",
        "base": "nano",
        "data": {"source": "digits"},
        "phases": [{"name": "plain", "until": 3}, {"name": "offload", "until": 7}],
    }
    return parse_config(raw, "test.yaml")


def phase(folder: Path, **metrics: object) -> Path:
    """An evaluated phase."""
    with artifact.publish(folder / "evaluation", "evaluation") as draft:
        for name in ("grid", "loss", "learning_rate"):
            Image.new("RGB", (8, 8), "red").save(draft.folder / f"{name}.png")
        draft.content = {"prompts": ["a red house"]}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_the_page_shows_every_phase_and_needs_no_other_file(config, tmp_path):
    """Metrics with units side by side, pictures inside the page, and where the weights lie."""
    plain = phase(tmp_path / "plain", prompt_accuracy=0.955, step=3, train_seconds=61.2)
    offload = phase(tmp_path / "offload", prompt_accuracy=0.99, step=7, peak_host_bytes=2**30)
    report(config, [plain, offload], tmp_path / "report")
    file = artifact.read(tmp_path / "report", "report").path("index.html")
    page = Page(file.read_text())
    assert len(page.references) == 4
    for reference in page.references:
        kind, data = reference.split(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert (
        "phase plain phase offload prompt accuracy 95.5% 99.0% steps 3 7 training time 1 min 01 s"
        in (page.text)
    )
    assert "peak host memory 1.00 GiB" in page.text
    assert f'from_pretrained("{offload / "weights"}")' in page.text
    assert page.text.index("95.5%") < page.text.index("99.0%")


def test_the_last_lines_say_where_things_lie(config, tmp_path, capsys):
    """The events of every phase lie below one folder, in progress/tensorboard."""
    run = tmp_path / "my results"
    run.mkdir()
    folders = [phase(run / name, step=3) for name in ("plain", "offload")]
    report(config, folders, run / "report")
    assert capsys.readouterr().out.splitlines() == [
        f"report   {run / 'report' / 'index.html'}",
        f"weights  {run / 'offload' / 'weights'}",
        f"grid     {run / 'offload' / 'evaluation' / 'grid.png'}",
        f"metrics  {run / 'offload' / 'metrics.json'}",
        f"curves   tensorboard --logdir '{run}'",
        f"use it   zerotrain sample '{run / 'offload' / 'weights'}' 'a red house'",
    ]


def test_a_phase_that_was_not_evaluated_is_named(config, tmp_path):
    plain = phase(tmp_path / "plain", step=3)
    (plain / "metrics.json").unlink()
    with pytest.raises(PipelineError, match=r"metrics\.json: missing, so phase plain"):
        report(config, [plain], tmp_path / "report")


def test_names_cannot_break_the_page(config, tmp_path):
    """Paths are a user's own: they are text, not markup."""
    odd = phase(tmp_path / "<b>&", step=3)
    report(config, [odd], tmp_path / "report")
    assert "<b>&" in Page((tmp_path / "report" / "index.html").read_text()).text
