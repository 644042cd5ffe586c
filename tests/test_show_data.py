"""`zerotrain data show`: what it prints of a folder, where from, and the sheet that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from tests.builders.commands import run_zerotrain
from tests.builders.photographs import CONFIG, write_photographs
from tests.builders.runs import make_run
from tests.families.texts import build

from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.data.figures import COUNTS
from zerotrain.data.sheets import GAP, MOST, SIDE, cell_size
from zerotrain.models import families
from zerotrain.models.families.prompt_tokens import token_limits
from zerotrain.run import show_data as module
from zerotrain.run.show_data import SHEET, show_data
from zerotrain.stages.prepare_dataset import checked_images, prepare_dataset

PREPARED = Path("results/data/r")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 usable images and 3 bad ones; no test may change them."""
    return write_photographs(tmp_path_factory.mktemp("photographs") / "images")


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without results."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cats(tmp_path: Path) -> Path:
    """A folder of three images of different patterns."""
    folder = tmp_path / "cats"
    folder.mkdir()
    for number in range(3):
        image = Image.effect_mandelbrot((64, 64), (-2 + number, -1.2, 0.5 + number, 1.2), 20)
        image.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"cat {number}")
    return folder


def make(folder: Path, **data: object) -> RunConfig:
    """A run on the images of a folder."""
    own = {"images": str(folder), "num_workers": 0, **data}
    return parse_config(make_run(data=own, train={"resolution": 32}), "test")


def test_it_shows_figures_and_a_sheet(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies, images that look alike and bad files by their names; a sheet of every usable one."""
    run = make(photographs, max_bad_samples=3, num_workers=2)
    assert show_data(run, checked_images, Path("shown")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{photographs}; the dataset is not prepared yet"
    for line in (
        f"  {COUNTS['train']:22}15",
        "  equal bytes           2 images in 1 group",
        f"{'':24}tower copy.png = tower.png",
        "  alike (4 of 64 bits)  2 images in 1 group",
        f"{'':24}flower small.jpg ~ flower.jpg (0 bits)",
        "  1 sample              empty file (0 bytes)",
        f"contact sheet: shown/{SHEET}, 15 of 15",
    ):
        assert line in lines
    assert not any("tokens" in line for line in lines)
    with Image.open(Path("shown") / SHEET) as sheet:
        across, down = cell_size()
        assert sheet.size == (5 * across + GAP, 3 * down + GAP)


def test_more_bad_samples_than_allowed_are_refused(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1; everything is shown first."""
    assert show_data(make(photographs, max_bad_samples=2), checked_images) == 1
    out = capsys.readouterr().out
    assert out.index("Problems") < out.index("contact sheet")
    assert out.splitlines()[-1] == (
        "prepare_dataset refuses this dataset: 3 bad samples, and data.max_bad_samples allows 2"
    )
    assert (PREPARED / "show" / SHEET).is_file()


def test_nothing_to_train_on_is_refused(cats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without any usable sample there is no sheet."""
    assert show_data(make(cats, holdout=0.999999), checked_images) == 1
    assert "data.holdout keeps every sample from training" in capsys.readouterr().out
    for caption in cats.glob("*.txt"):
        caption.unlink()
    assert show_data(make(cats), checked_images, Path("shown")) == 1
    assert "contact sheet" not in capsys.readouterr().out
    assert not Path("shown").exists()


def edit_caption(folder: Path) -> None:
    (folder / "1.txt").write_text("a dog")


def add_image(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "new.png")


def remove_image(folder: Path) -> None:
    (folder / "1.png").unlink()


def edit_image(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "1.png")


@pytest.mark.parametrize("edit", [edit_caption, add_image, remove_image, edit_image])
def test_a_prepared_dataset_is_shown_while_the_source_has_it(
    cats: Path, edit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not checked again; after any edit the source is."""
    run = make(cats, max_bad_samples=3)
    prepare_dataset(run.data, PREPARED)
    capsys.readouterr()

    def check_nothing(*given: object) -> list:
        raise AssertionError

    assert show_data(run, check_nothing) == 0
    before = capsys.readouterr().out
    assert before.splitlines()[0] == f"{cats}, as {PREPARED} has it"
    edit(cats)
    assert show_data(run, checked_images) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    reason = (
        f"{cats}: 1.png changed since prepare_dataset"
        if edit is edit_image
        else f"{PREPARED} is not what the source has now"
    )
    assert first == f"{cats}; {reason}"


def test_a_dataset_of_other_settings_is_not_shown(
    cats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that decide nothing of it do not count."""
    prepare_dataset(make(cats).data, PREPARED)
    for data, origin in (({"num_workers": 1}, ", as"), ({"repeats": 2}, ";")):
        show_data(make(cats, **data), checked_images)
        assert f"{cats}{origin}" in capsys.readouterr().out


def test_many_images_give_a_sheet_of_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evenly spaced ones, of which only small pictures are kept."""
    folder = tmp_path / "many"
    folder.mkdir()
    count = 2 * MOST
    for number in range(count):
        Image.new("RGB", (300, 200), (number, 0, 0)).save(folder / f"{number:03d}.bmp")
    drawn: list = []

    def draw(pictures: list) -> Image.Image:
        drawn.append(pictures)
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(module, "draw_sheet", draw)
    run = make(folder, caption_strategy="filename")
    assert show_data(run, checked_images) == 0
    assert f"{MOST} of {count}" in capsys.readouterr().out
    [pictures] = drawn
    assert [picture.file for picture in pictures] == [f"{2 * n:03d}.bmp" for n in range(MOST)]
    assert {max(picture.image.size) for picture in pictures} == {SIDE}


def test_tokens_are_counted_where_the_base_is(
    cats: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no caption exceeds the limit; else with what the encoders cut."""
    (cats / "1.txt").write_text("one two three four five six")
    (Path("base") / "tokenizer").mkdir(parents=True)

    def caption_limits(base, captions, max_sequence_length):
        counts = [len(caption.split()) for caption in captions]
        return token_limits({"tokenizer": 4, "tokenizer_2": 8}, dict.fromkeys(
            ("tokenizer", "tokenizer_2"), counts))  # fmt: skip

    fake = SimpleNamespace(modality="image", caption_limits=caption_limits)
    monkeypatch.setattr(families, "load_family", lambda name: fake)
    run = make(cats).model_copy(update={"base": "base"})
    assert show_data(run, checked_images) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens 2 to 6, median 2; 8 read by tokenizer_2 captions" in text
    cut = "tokens 2 to 6, median 2; 4 read by tokenizer: 1 of 3 captions are cut, by up to 2 tokens"
    assert cut in text


def test_text_is_shown_without_a_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From its source; from the prepared dataset where that is gone."""
    rows = [{"instruction": f"{n} and {n}", "output": str(2 * n)} for n in range(3)]
    file = tmp_path / "sums.json"
    file.write_text(json.dumps([*rows, {"instruction": "", "output": "x"}]))
    raw = make_run(
        family="causal_lm",
        data={"source": "text", "path": str(file), "max_bad_samples": 1},
    )
    run = parse_config(raw, "test")
    assert show_data(run, checked_images) == 0
    prepare_dataset(run.data, PREPARED)
    shown, _ = capsys.readouterr().out.split("3 examples")
    assert shown.startswith(f"{file}\n\nSamples\n  trained on            3\n")
    assert "empty instruction" in shown
    assert not (PREPARED / "show").exists()
    file.unlink()
    assert show_data(run, checked_images) == 0
    assert capsys.readouterr().out == shown.replace(
        f"{file}\n", f"{PREPARED}; {file} cannot be read now\n", 1
    )


@pytest.mark.parametrize("template", ["{{ m.content }}", "{{ m.reasoning_content }}"])
def test_keys_that_are_not_used_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    """Those of the source, also where only the prepared dataset is left, and those that the base's
    chat template does not take, where the base is."""
    answer = {"role": "assistant", "content": "b", "reasoning": "hm", "foo": 1}
    forgiven = {"role": "assistant", "content": "c", "weight": 0}
    turns = [{"role": "user", "content": "a"}, forgiven, {"role": "user", "content": "a"}, answer]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"messages": turns, "score": 1}] * 2))
    base = build("causal_lm", tmp_path / "base")
    (base / "chat_template.jinja").write_text(f"{{% for m in messages %}}{template}{{% endfor %}}")
    data = {"source": "text", "path": str(file)}
    run = parse_config(make_run(family="causal_lm", data=data, base=str(base)), "test")
    prepare_dataset(run.data, PREPARED)
    assert "WARNING: left out: key foo of 2 turns" in capsys.readouterr().err
    for _ in range(2):
        assert show_data(run, checked_images) == 0
        shown = capsys.readouterr().out
        assert "  reasoning_content     2 turns\n" in shown
        assert "  not learned           2 answers (weight: 0 or train: false)\n" in shown
        assert (
            "\nLeft out\n  key score             2 rows\n  key foo               2 turns\n" in shown
        )
        unused = "  reasoning_content     2 turns: the chat template does not take it\n"
        assert (unused in shown) is ("reasoning" not in template)
        file.unlink(missing_ok=True)


@pytest.mark.slow
def test_the_command_ends_as_others_do(photographs: Path, tmp_path: Path) -> None:
    """0, 1 for a dataset that is refused, 2 with a hint for a folder that is missing."""
    for allowed, images, code in ((3, photographs, 0), (0, photographs, 1), (0, "gone", 2)):
        text = CONFIG.replace("IMAGES", str(images)).replace("samples: 3", f"samples: {allowed}")
        (tmp_path / "run.yaml").write_text(text)
        done = run_zerotrain("data", "show", "run.yaml", "--output", "o", folder=tmp_path)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert "gone: no such folder" in done.stderr
    assert "Hint:" in done.stderr
