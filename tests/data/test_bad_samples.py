"""One count of bad samples: `new`, `check`, `data show` and prepare_dataset agree, and each says
what it has not opened."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path

import pytest
import yaml
from PIL import Image
from tests.builders.runs import make_run
from typer.testing import CliRunner

from zerotrain import cli
from zerotrain.config.read import parse_config
from zerotrain.data import files
from zerotrain.errors import PipelineError
from zerotrain.graph.checks import forget_checks, read_checked_runs
from zerotrain.graph.new_run import new as write_new
from zerotrain.graph.options import NewOptions
from zerotrain.stages.prepare_dataset import prepare_dataset

ROOT = Path(__file__).parents[2]
FILE = Path("config/cats.yaml")


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch) -> None:
    """The working directory, with a preset; a process looks once at a path, here at each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_walk_once", lru_cache(maxsize=0)(files._walk))
    forget_checks()
    Path("config/launch").mkdir(parents=True)
    shutil.copy(ROOT / "config/launch/torch.yaml", "config/launch")


@pytest.fixture
def photos() -> Path:
    """Four usable images; a missing, an unreadable and an empty caption, a caption without image,
    and two images that are damaged."""
    folder = Path("photos")
    folder.mkdir()
    for number in range(9):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"photo {number}")
    (folder / "4.txt").unlink()
    (folder / "5.txt").write_bytes(b"caf\xe9")
    (folder / "6.txt").write_text(" \n")
    (folder / "alone.txt").write_text("a photo that is gone")
    for number in (7, 8):
        (folder / f"{number}.png").write_bytes(b"no image")
    return folder


def configure(**data: object) -> None:
    """Write the run's file."""
    FILE.write_text(
        yaml.safe_dump(make_run(run="cats", data=data, train={"resolution": 32})), encoding="utf-8"
    )


def first_line(*words: str) -> str:
    """The first line that a command prints."""
    return said(*words).splitlines()[0]


def said(*words: str, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(cli.command_line(words), [*words])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def test_images_have_one_count_until_they_are_opened(photos):
    """`new` and `check` count 4 of 10 and say that no image is opened; those that open them, 6."""
    text = write_new(NewOptions("other", "nano", photos)).read_text()
    assert "# 4 of 10 samples of photos are bad, first 4.png:\n" in text
    assert "# No image was opened; `zerotrain data show other` opens them.\n" in text
    configure(images="photos", max_bad_samples=3)
    with pytest.raises(PipelineError, match="4 of 10 samples of photos are bad, and 3 may be bad"):
        read_checked_runs(FILE, captions=True)
    configure(images="photos", max_bad_samples=4)
    assert first_line("check", "cats") == (
        "data: 4 of 10 samples of photos are bad, and 4 may be: 4.png (no caption: no 4.txt next "
        "to it) and 3 more; no image is opened, which `zerotrain data show cats` does"
    )
    shown = said("data", "show", "cats", code=1)
    assert "6 bad samples, and data.max_bad_samples allows 4" in shown
    run = read_checked_runs(FILE)[str(FILE)]
    with pytest.raises(PipelineError, match="photos: 6 of 10 samples are bad"):
        prepare_dataset(run.data, Path("results/data/cats"))
    configure(images="photos", max_bad_samples=6)
    run = read_checked_runs(FILE)[str(FILE)]
    prepare_dataset(run.data, Path("results/data/cats"))
    assert first_line("check", "cats") == (
        "data: 6 of 10 samples are bad, as results/data/cats lists them; nothing changed since"
    )


def test_runs_of_one_dataset_have_one_line(photos):
    """A sweep names the first of its runs."""
    for run in ("a", "b"):
        data = {"images": "photos", "name": "shared", "max_bad_samples": 4}
        raw = make_run(run=run, data=data, train={"resolution": 32})
        Path(f"config/{run}.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    FILE.write_text("runs: [config/a.yaml, config/b.yaml]\n", encoding="utf-8")
    line, checked = said("check", "config/cats.yaml").splitlines()
    assert checked.startswith("config/cats.yaml: 2 runs are valid")
    assert line.endswith("`zerotrain data show a` does")


def test_a_plan_counts_what_it_can_without_captions(photos):
    """Names alone: the missing caption and the one without an image; `check` finds the others."""
    configure(images="photos", max_bad_samples=1)
    with pytest.raises(PipelineError, match="2 of 10 samples of photos are bad, and 1 may be bad"):
        read_checked_runs(FILE)
    configure(images="photos", max_bad_samples=2)
    assert read_checked_runs(FILE)
    with pytest.raises(PipelineError, match="4 of 10 samples"):
        read_checked_runs(FILE, captions=True)


def test_sources_have_one_limit_together(photos):
    """As in prepare_dataset: each may have fewer bad samples than all may, and the sum decides."""
    Image.new("RGB", (8, 8)).save("more.png")
    Path("more").mkdir()
    Path("more.png").rename("more/a.png")
    Image.new("RGB", (8, 8), (9, 9, 9)).save("more/b.png")
    Path("more/b.txt").write_text("b", encoding="utf-8")
    parts = [{"name": name, "images": name} for name in ("photos", "more")]
    configure(sources=parts, max_bad_samples=4)
    with pytest.raises(PipelineError) as caught:
        read_checked_runs(FILE, captions=True)
    assert "data.sources: 5 of 12 samples are bad, and 4 may be bad" in str(caught.value)
    configure(sources=parts, max_bad_samples=5)
    assert "data: 5 of 12 samples" in said("check", "cats")


def test_text_has_one_count_everywhere():
    """`check` reads all rows, as `new`, `data show` and prepare_dataset do."""
    good = [{"instruction": f"{n}+1?", "output": str(n + 1)} for n in range(5)]
    bad = [{"instruction": "a?", "output": " "}, {"instruction": "b?", "output": None}]
    Path("talks.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*good, *bad]), encoding="utf-8"
    )
    text = write_new(NewOptions("other", "nano", text="talks.jsonl")).read_text()
    assert "# 2 of 7 samples of talks.jsonl are bad, first talks.jsonl line 6:\n" in text
    section = {"source": "text", "path": "talks.jsonl"}
    raw = make_run(run="cats", family="causal_lm", data=section)
    FILE.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(PipelineError) as caught:
        read_checked_runs(FILE, captions=True)
    assert "data.path: 2 of 7 samples of talks.jsonl are bad, and 0 may be bad" in str(caught.value)
    assert "2 bad samples" in said("data", "show", "cats", code=1)
    with pytest.raises(PipelineError, match=r"talks.jsonl: 2 of 7 samples are bad"):
        prepare_dataset(parse_config(raw, "c").data, Path("dataset"))
    FILE.write_text(
        yaml.safe_dump(raw | {"data": {**section, "max_bad_samples": 2}}), encoding="utf-8"
    )
    assert said("check", "cats").startswith(
        "data: 2 of 7 samples of talks.jsonl are bad, and 2 may be: talks.jsonl line 6 ("
    )


def test_what_is_on_the_hub_is_said_not_to_be_opened():
    raw = make_run(run="cats", family="causal_lm", data={"source": "text", "path": "owner/talks"})
    FILE.write_text(yaml.safe_dump(raw), encoding="utf-8")
    assert first_line("check", "cats") == (
        "data: owner/talks on the hub is not opened; `zerotrain data show cats` counts bad samples"
    )
