"""report: one page that needs nothing else."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from tests.builders.reported import RUN, launched
from tests.builders.states import HISTORY, RAN_ON, make_position

from zerotrain import artifact
from zerotrain.config.read import parse_config
from zerotrain.data.dataset import IMAGES, Sample
from zerotrain.data.dataset_folder import publish_dataset
from zerotrain.data.open import open_source
from zerotrain.data.sheets import GAP, cell_size, draw_grid
from zerotrain.errors import PipelineError
from zerotrain.evaluation.results import Answer, write_answers
from zerotrain.export.formats.loading_code import loading_code
from zerotrain.run.report import samples
from zerotrain.stages.report import ReportSettings, report, use_command
from zerotrain.state.checkpoint import write_position

PROMPTS, COLOURS = ["a red house", "a <blue> house"], ["red", "blue"]


class Page(HTMLParser):
    """Text, pictures and links of a page; every element that opens must close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.sources += [given[name] for name in ("src", "srcset") if name in given]
        self.links += [given["href"]] if "href" in given else []
        self.names |= {given["id"]} if "id" in given else set()
        self.tags.add(tag)
        assert not [name for name in given if name.startswith("on")]
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def pictures(self) -> list[Image.Image]:
        return [Image.open(BytesIO(base64.b64decode(s.split(",")[1]))) for s in self.sources]

    @property
    def samples(self) -> list[Image.Image]:
        """Pictures that are no figures."""
        return [picture for picture in self.pictures if picture.width < 600]


@pytest.fixture
def settings() -> ReportSettings:
    return ReportSettings.of(parse_config(RUN, "test.yaml"))


def show(settings: ReportSettings, phases: list[Path], folder: Path) -> Page:
    """The page that reports these phases."""
    report(settings, phases, folder / "report")
    return Page((folder / "report" / "index.html").read_text())


def phase(
    folder: Path, *, wide: bool = False, others: Mapping[str, str] = {}, **metrics: object
) -> Path:
    """An evaluated phase, also of wide images; other grids have a colour by their file."""
    with artifact.publish(folder / "evaluation", "evaluation") as draft:
        for file, colour in others.items():
            made = [[Image.new("RGB", (8, 8), colour)] * 2 for _ in PROMPTS]
            draw_grid(PROMPTS, made).save(draft.folder / file)
        for name in ("loss", "learning_rate"):
            Image.new("RGB", (8, 8), "red").save(draft.folder / f"{name}.png")
        rows = [[Image.new("RGB", (8, 8), colour)] * 2 for colour in COLOURS]
        draw_grid(PROMPTS, rows).save(draft.folder / "grid.png")
        if wide:
            wider = [[image.resize((24, 8)) for image in row] for row in rows]
            draw_grid(PROMPTS, wider).save(draft.folder / "grid-24x8.png")
        draft.content = {"prompts": PROMPTS}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_the_page_shows_every_phase_and_needs_no_other_file(settings, tmp_path):
    """Metrics with units side by side, pictures inside the page, links within it, no script."""
    plain = phase(tmp_path / "plain", prompt_accuracy=0.955, step=3, train_seconds=61.2)
    offload = phase(tmp_path / "offload", prompt_accuracy=0.99, step=7, peak_host_bytes=2**30)
    report(settings, [plain, offload], tmp_path / "report")
    file = artifact.read(tmp_path / "report", "report").path("index.html")
    page = Page(file.read_text())
    assert len(page.sources) == 2 * len(PROMPTS) + 2  # and the bytes on disk, light and dark
    for source in page.sources:
        kind, data = source.split(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert {link[:1] for link in page.links} == {"#"}
    assert {link[1:] for link in page.links} <= page.names
    assert "script" not in page.tags
    assert "default-src 'none'" in file.read_text()
    assert "plain offload prompt accuracy 95.5% 99.0% steps 3 7" in page.text
    assert (
        "phase plain phase offload training time 1 min 01 s peak host memory 1.00 GiB" in page.text
    )
    assert f'from_pretrained( "{offload / "weights"}", dtype=dtype' in page.text


def test_further_sizes_follow_the_squares(settings, tmp_path):
    """Under their names, with their prompts."""
    folder = phase(tmp_path / "plain", step=3)
    squares = show(settings, [folder], tmp_path / "squares")
    both = show(
        settings, [phase(tmp_path / "both" / "plain", wide=True, step=3)], tmp_path / "both"
    )
    assert len(both.sources) == len(squares.sources) + len(PROMPTS)
    [squares_first, wide] = both.text.split("24x8")
    assert all(prompt in part for prompt in PROMPTS for part in (squares_first, wide))


def test_the_last_lines_say_where_things_lie(settings, tmp_path, capsys):
    """The events of every phase lie below one folder, in progress/tensorboard."""
    run = tmp_path / "my results"
    run.mkdir()
    folders = [phase(run / name, step=3) for name in ("plain", "offload")]
    report(settings, folders, run / "report")
    assert capsys.readouterr().out.splitlines() == [
        f"report   {run / 'report' / 'index.html'}",
        f"weights  {run / 'offload' / 'weights'}",
        f"grid     {run / 'offload' / 'evaluation' / 'grid.png'}",
        f"metrics  {run / 'offload' / 'metrics.json'}",
        f"curves   tensorboard --logdir '{run}'",
        f"use it   zerotrain sample '{run / 'offload' / 'weights'}' 'a red house' --resolution 32",
    ]


@pytest.mark.parametrize(
    ("content", "resolution", "words"),
    [
        ({"prompts": ["a red house", "a cat"]}, 64, ["sample", "w", "a cat", "--resolution", "64"]),
        ({"prompts": ["2+2=", "a long question"]}, None, ["generate", "w", "2+2="]),
        (
            {"prompts": ["a long question", "2+2="], "systems": ["", "You add numbers."]},
            None,
            ["generate", "w", "2+2=", "--system", "You add numbers."],
        ),
        ({"prompts": ["2+2="], "systems": [""]}, None, ["generate", "w", "2+2="]),
        (
            {"prompts": ["make it red", "dye"], "conditioning_images": [["a.png"], ["b.png"]]},
            64,
            ["sample", "w", "dye", "--image", "e/b.png", "--resolution", "64"],
        ),
    ],
)
def test_the_line_to_use_asks_as_the_evaluation_did(content, resolution, words):
    """With the shortest of its prompts, which fits a terminal, and the system's turn before it."""
    assert use_command(Path("w"), content, resolution, Path("e")) == ["zerotrain", *words]


def test_the_four_questions_have_their_order(settings, tmp_path):
    """Each prompt has the images of all phases next to each other; rows that hold nothing are
    left out."""
    zero = {"peak_host_bytes": 2**30, "peak_device_bytes": 0}
    folders = [phase(tmp_path / name, step=3, **zero) for name in ("plain", "offload")]
    page = show(settings, folders, tmp_path)
    places = [
        page.text.rindex(text)
        for text in ("Did it learn?", "a <blue> house", "Is it healthy?", "What did it cost?",
                     "peak host memory 1.00 GiB", "What was it made of?")
    ]  # fmt: skip
    assert places == sorted(places)
    assert "peak GPU memory" not in page.text
    assert [picture.size for picture in page.samples] == [(2 * 68 - 4, 64)] * 4
    colours = [picture.convert("RGB").getpixel((70, 5)) for picture in page.samples]
    assert colours == [(255, 0, 0)] * 2 + [(0, 0, 255)] * 2


def test_what_is_missing_is_said(settings, tmp_path):
    """A run without logs, launches, checkpoints and dataset."""
    text = show(settings, [phase(tmp_path / "plain", step=3)], tmp_path).text
    for sentence in (
        "Phase plain: evaluated, and nothing was measured.",
        "There are no images of the base model",
        "No log was found (metrics.jsonl), so there are no curves.",
        "The time of the parts of a step was not recorded.",
        "The log has no memory.",
        "The log has no throughput.",
        "There is no forecast of the planner",
        "The dataset that was trained on is not here, so its figures are missing.",
        "Phase plain was launched by hand, so its values have no sources.",
        "Versions and devices were not recorded.",
    ):
        assert sentence in text


def logged(folder: Path, log: list[dict[str, object]], **metrics: object) -> Path:
    """An evaluated phase with its state, whose records have the log."""
    phase(folder, **metrics)
    with artifact.publish(folder / "state", "state") as draft:
        (draft.folder / "records").mkdir()
        text = "".join(json.dumps(line) + "\n" for line in log)
        (draft.folder / "records" / "metrics.jsonl").write_text(text)
    return folder


def test_curves_are_pictures_for_light_and_dark_with_their_numbers(settings, tmp_path):
    """Losses with the switch and its jump, gradient norm, learning rate, memory, throughput."""
    line = {"grad_norm": 0.5, "learning_rate": 1e-3, "host_bytes": 2**30, "device_bytes": 0}
    losses = [2.5, 2.4, 2.6, 2.5, 1.5, 1.4, 1.6, 1.5]
    log = [
        {"phase": "plain" if step < 5 else "offload", "step": step, "loss": loss, **line}
        | {"samples_per_second": 8.0 + step}
        for step, loss in enumerate(losses, start=1)
    ]
    log.append({"phase": "offload", "step": 8, "val_loss": 1.25})
    parts = {"forward_seconds": 1.0, "backward_seconds": 3.0}
    folders = [
        phase(tmp_path / "plain", step=4),
        logged(tmp_path / "offload", log, step=8, **parts),
    ]
    page = show(settings, folders, tmp_path)
    figures = [picture for picture in page.pictures if picture.width > 600]
    papers = [picture.convert("RGB").getpixel((2, 2)) for picture in figures]
    # Each figure in its dark form first; the last one is the bytes on disk.
    assert papers == [(21, 24, 28), (255, 255, 255)] * 7
    for text in (
        "plain → offload 4 nothing that is recorded 2.5 ± 0.082 1.5 ± 0.082",
        "The lowest validation loss is 1.25, at step 8.",
        "phase step loss val_loss grad_norm learning_rate plain 1 2.5 0.5 0.001",
        "The first process has at most 1.00 GiB, at step 1.",
        "plain: 11 samples per second in the middle line of the log, 9 to 12 over all lines.",
        "forward 1.0 s (25%) backward 3.0 s (75%) in all 4.0 s",
    ):
        assert text in page.text


def test_images_before_the_first_step_are_the_base_models(tmp_path):
    """If the validation made them as the evaluation does; they come first in the row."""
    sampling = {"images_per_prompt": 2, "num_inference_steps": 5}
    raw = RUN | {
        "data": {"source": "digits", "holdout": 0.5},
        "evaluate": sampling,
        "validation": {"prompts": PROMPTS[:1], **sampling},
        "phases": RUN["phases"][:1],
    }
    config = parse_config(raw, "test.yaml")
    only = phase(tmp_path / "plain", step=3)
    launched(only, config)
    samples = only / "progress" / "samples"
    samples.mkdir(parents=True)
    grid = draw_grid(PROMPTS[:1], [[Image.new("RGB", (8, 8), "lime")] * 2])
    grid.save(samples / "step-00000000.png")
    page = show(ReportSettings.of(config), [only], tmp_path)
    colours = [picture.convert("RGB").getpixel((70, 5)) for picture in page.samples]
    assert colours == [(0, 255, 0), (255, 0, 0), (0, 0, 255)]
    assert "a red house base model : a red house close plain : a red house" in page.text
    assert "There are no images of the base model" not in page.text


def test_base_and_weights_without_averaging_stand_in_the_same_row(tmp_path):
    """The base first; the averaged weights after those of the same phase. A validation's images of
    the base are not shown twice."""
    sampling = {"images_per_prompt": 2, "num_inference_steps": 5}
    raw = RUN | {
        "data": {"source": "digits", "holdout": 0.5},
        "evaluate": sampling,
        "validation": {"prompts": PROMPTS[:1], **sampling},
    }
    config = parse_config(raw, "test.yaml")
    folders = [
        phase(tmp_path / "plain", step=3, others={"base.png": "lime", "raw.png": "yellow"}),
        phase(tmp_path / "offload", step=7, others={"raw.png": "cyan"}),
    ]
    for folder in folders:
        with artifact.publish(folder / "weights", "weights") as draft:
            draft.content = {"ema": True}
    page = show(ReportSettings.of(config), folders, tmp_path)
    labels = ("base model", "plain, without averaging", "plain (EMA)")
    labels += ("offload, without averaging", "offload (EMA)")
    for prompt in PROMPTS:
        row = " ".join(f"{label} : {prompt} close" for label in labels)
        assert f"{prompt} {row}" in page.text
    colours = [picture.convert("RGB").getpixel((70, 5)) for picture in page.samples]
    lime, yellow, cyan = (0, 255, 0), (255, 255, 0), (0, 255, 255)
    own = [(255, 0, 0), (0, 0, 255)]
    assert colours == [one for red in own for one in (lime, yellow, red, cyan, red)]
    assert "without averaging." not in page.text
    assert "There are no images of the base model" not in page.text
    launched(folders[0], config)
    samples = folders[0] / "progress" / "samples"
    samples.mkdir(parents=True)
    grid = draw_grid(PROMPTS[:1], [[Image.new("RGB", (8, 8), "white")] * 2])
    grid.save(samples / "step-00000000.png")
    page = show(ReportSettings.of(config), folders, tmp_path)
    assert page.text.count("base model : a red house") == 1
    colours = [picture.convert("RGB").getpixel((70, 5)) for picture in page.samples]
    assert (colours[0], colours[5]) == ((255, 255, 255), lime)


def test_large_samples_are_compressed(settings, tmp_path, monkeypatch):
    """As WebP, and the page says so; a picture keeps its size."""
    monkeypatch.setattr(samples, "MOST_BYTES", 100)
    file = tmp_path / "report" / "index.html"
    report(settings, [phase(tmp_path / "plain", step=3)], file.parent)
    page = Page(file.read_text())
    assert [(one.format, one.size) for one in page.samples] == [("WEBP", (132, 64))] * 2
    assert "The images are compressed with loss" in page.text
    assert "data:image/webp;base64," in file.read_text()


def test_no_folder_of_the_user_is_on_the_page(settings, tmp_path, monkeypatch):
    """Paths are relative to the project; home folders and keys are replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/srv/me")
    odd = settings.model_copy(update={"base": "/srv/me/models/x", "revision": "hf_" + "a" * 30})
    data = settings.data.model_copy(update={"images": "/home/anna/cats"})
    odd = odd.model_copy(update={"data": data})
    report(odd, [phase(tmp_path / "results/digits/plain", step=3)], tmp_path / "report")
    text = Path("report/index.html").read_text(encoding="utf-8")
    assert "results/digits/plain" in text
    assert "~/models/x" in text
    for private in (str(tmp_path), "/srv/me", "anna", "aaaa"):
        assert private not in text


def test_the_page_shows_code_that_loads_the_adapter(settings, tmp_path):
    """The code that tests/formats/test_loading_code.py runs."""
    only = phase(tmp_path / "plain", step=3)
    (only / "weights").mkdir(parents=True)
    (only / "weights" / "pytorch_lora_weights.safetensors").write_text("{}")
    text = show(settings, [only], tmp_path).text
    code = loading_code(only / "weights", "sdxl", "a red house", resolution=32)
    assert "pipeline.load_lora_weights(" in code
    assert " ".join(code.split()) in text


def test_the_page_says_what_it_was_made_of(settings, tmp_path):
    """Figures of the dataset, a sheet of its images, the day, and the commit that trained."""
    only = phase(tmp_path / "plain", step=3)
    source = open_source(settings.data)
    sizes = {"scan-0000": (64, 32), "scan-0001": (16, 16)}
    hostile = "<img src=x onerror=alert(1)> <script>alert(2)</script>"
    samples = [
        Sample(name, source.sha256(name), hostile, "", size, size, (0, 0, min(size)), "train")
        for name, size in sizes.items()
    ]
    publish_dataset(tmp_path / "data", IMAGES, samples, repeats=1)
    with artifact.publish(
        only / "evaluation",
        "evaluation",
        parents={"dataset": artifact.read(tmp_path / "data", "dataset")},
    ) as draft:
        other = phase(tmp_path / "other", step=3) / "evaluation"
        for name in ("grid", "loss", "learning_rate"):
            shutil.copy(other / f"{name}.png", draft.folder)
        draft.content = {"prompts": PROMPTS}
    made_by = {"commit": "0123456789abcdef-dirty"}
    with artifact.publish(only / "checkpoint", "checkpoint", made_by=made_by) as draft:
        (draft.folder / "state.json").write_text("{}")
    page = show(settings, [only], tmp_path)
    text = page.text
    assert hostile in text
    assert "script" not in page.tags
    assert "x" not in page.sources
    assert "Samples trained on 2 Sizes width in pixels 16 to 64, median 40" in text
    assert "left out" not in text
    assert "enlarged images 1 of 2 are smaller than 32 px and are enlarged, up to 2.0 times" in text
    assert "square crop drops 44% of all image area, most of scan-0000 (50%)" in text
    sheet = next(one for one in page.samples if one.height > 100)
    assert sheet.size == (2 * cell_size()[0] + GAP, cell_size()[1] + GAP)
    assert "commit 0123456789 with local changes" in text
    assert f"report of {datetime.now(UTC):%Y-%m-%d}" in text


def trained(folder: Path, step: int, **recorded: object) -> Path:
    """An evaluated phase with its checkpoint."""
    phase(folder, step=step)
    with artifact.publish(folder / "checkpoint", "checkpoint") as draft:
        position = make_position(step, phase=folder.name, **recorded)
        write_position(draft.folder, position, {}, [], [])
    return folder


def test_the_page_says_what_is_exact_and_what_changed(settings, tmp_path):
    """Each change with the phase that it came in; versions in a part that opens."""
    before = {"ran_on": {**RAN_ON, "versions.torch": "2.13.0"}, "history": HISTORY[:2]}
    folders = [
        trained(tmp_path / "plain", 300, **before),
        trained(tmp_path / "offload", 700, ran_on=RAN_ON, history=HISTORY),
    ]
    text = show(settings, folders, tmp_path).text
    assert "phase steps that are exact plain steps 121 to 300, since the change" in text
    exact = "offload steps 301 to 700, since the change after step 300: version of train_phase"
    assert exact in text
    assert (
        "Changed while it trained Dotted lines in the figures. phase after step what before after "
        "plain 120 torch 2.12.0 2.13.0 plain 120 gradient_checkpointing false true "
        "offload 300 version of train_phase 1 2 offload 300 NVIDIA_TF32_OVERRIDE unset 0"
    ) in text
    assert "phase plain phase offload device NVIDIA H100 80GB HBM3, driver 570.86" in text


def test_a_page_without_changes_or_records_has_no_table_of_them(settings, tmp_path):
    """One phase that recorded what it ran on, one that did not."""
    folders = [trained(tmp_path / "plain", 3), trained(tmp_path / "offload", 7, ran_on=RAN_ON)]
    text = show(settings, folders, tmp_path).text
    assert "plain not recorded offload all steps" in text
    assert "Changed while it trained" not in text
    assert "phase offload device NVIDIA H100 80GB HBM3, driver 570.86 threads" in text


def test_the_commit_is_in_the_records(settings, tmp_path):
    only = phase(tmp_path / "plain", step=3)
    said = {"commit": "0123456789abcdef", "version": 7}
    with artifact.publish(only / "checkpoint", "checkpoint") as draft:
        (draft.folder / "state.json").write_text("{}")
        (draft.folder / "records").mkdir()
        artifact.write_json(draft.folder / "records" / "made_by.json", said)
    text = show(settings, [only], tmp_path).text
    assert "commit 0123456789" in text


def test_a_phase_that_was_not_evaluated_is_named(settings, tmp_path):
    plain = phase(tmp_path / "plain", step=3)
    (plain / "metrics.json").unlink()
    with pytest.raises(PipelineError, match=r"metrics\.json: missing, so phase plain"):
        report(settings, [plain], tmp_path / "report")


def test_names_cannot_break_the_page(settings, tmp_path):
    """Paths are a user's own: they are text, not markup."""
    odd = phase(tmp_path / "<b>&" / "plain", step=3)
    report(settings, [odd], tmp_path / "report")
    assert "<b>&" in Page((tmp_path / "report" / "index.html").read_text()).text


def test_wrong_answers_of_the_last_phase_come_first(tmp_path):
    """Escaped, next to what was expected and what the phases before generated."""
    raw = {
        "run": "sums",
        "family": "causal_lm",
        "base": "nano",
        "data": {"source": "sums"},
        "phases": [{"name": "plain", "until": 3}, {"name": "offload", "until": 7}],
    }
    given = {"plain": ["1", "6"], "offload": ["2", "5"]}
    for name, answers in given.items():
        with artifact.publish(tmp_path / name / "evaluation", "evaluation") as draft:
            one, two = answers
            write_answers(
                draft.folder / "answers.jsonl", [Answer("1+1=", "2", one), Answer("<b>", "4", two)]
            )
            draft.content = {"prompts": ["1+1=", "<b>"]}
        (tmp_path / name / "metrics.json").write_text('{"exact_match": 0.5}')
    settings = ReportSettings.of(parse_config(raw, "test.yaml"))
    page = show(settings, [tmp_path / name for name in given], tmp_path)
    head = "prompt expected phase plain phase offload"
    assert f"{head} <b> 4 6 5 1+1= 2 1 2" in page.text
    assert "answers that are exactly right 50.0% 50.0%" in page.text
    assert "contact sheet" not in page.text


@pytest.mark.parametrize(
    ("data", "content", "form"),
    [
        ({"format": "alpaca", "prompt_template": "alpaca"}, {}, {"raw": True}),
        ({}, {"systems": ["You add numbers.", ""]}, {"system": "You add numbers."}),
    ],
)
def test_the_page_shows_code_that_asks_as_the_training_did(tmp_path, data, content, form):
    """A prompt as it is, or with the system's turn before it."""
    raw = {
        "run": "sums",
        "family": "causal_lm",
        "base": "nano",
        "data": {"source": "text", "path": "sums.json", **data},
        "phases": [{"name": "only", "until": 3}],
    }
    only = tmp_path / "only"
    with artifact.publish(only / "evaluation", "evaluation") as draft:
        for name in ("loss", "learning_rate"):
            Image.new("RGB", (8, 8), "red").save(draft.folder / f"{name}.png")
        draft.content = {"prompts": ["1+2=", "3+4="], **content}
    (only / "metrics.json").write_text('{"step": 3}')
    text = show(ReportSettings.of(parse_config(raw, "test.yaml")), [only], tmp_path).text
    plain = loading_code(only / "weights", "causal_lm", "1+2=")
    code = loading_code(only / "weights", "causal_lm", "1+2=", **form)
    assert " ".join(plain.split()) not in text
    assert " ".join(code.split()) in text
