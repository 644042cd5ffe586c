"""Datasets of other programs, trained from as they are."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.builders.caching import encode_pixels
from tests.builders.commands import run_zerotrain
from tests.builders.images import make_image_config, make_pictures, prepare_inputs, write_pictures
from tests.builders.phases import PRESETS
from tests.builders.runs import make_config
from tests.training.conftest import Training

from zerotrain.data.dataset import read_dataset
from zerotrain.launch.files import read_run_yaml
from zerotrain.stages.render_launch import LaunchSettings, render_launch
from zerotrain.training.batches import Batches

SIDE, SMALL, STEPS = 16, 8, 2
Sections = dict[str, Any]
Drawn = dict[tuple[str, str], int]
"""How often an epoch draws a sample with a caption."""


def draw(folder: str, **captions: str) -> None:
    """Images of these names in a new folder; each that has a caption has a file with it."""
    Path(folder).mkdir(parents=True)
    pictures = make_pictures(SIDE, len(captions))
    for image, (name, caption) in zip(pictures, captions.items(), strict=True):
        image.save(f"{folder}/{name}.png")
        if caption:
            write(f"{folder}/{name}.txt", caption)


def write(file: str, text: str) -> None:
    """A text file."""
    Path(file).write_text(text, encoding="utf-8")


def import_data(file: str) -> Sections:
    """What `zerotrain data import` writes."""
    done = run_zerotrain("data", "import", file, "--output", "imported.yaml")
    assert done.returncode == 0, done.stderr
    found: Sections = yaml.safe_load(Path("imported.yaml").read_text(encoding="utf-8"))
    return found


def simpletuner_backends() -> tuple[Sections, Drawn]:
    """SimpleTuner's multidatabackend.json: file names, caption files, repeats, two resolutions."""
    draw("photos", red_house="", boat="")
    draw("small", a="a house", b="a ship")
    square = {
        "type": "local", "crop": True, "crop_style": "center", "crop_aspect": "square",
        "resolution_type": "pixel",
    }  # fmt: skip
    backends = [
        {"id": "mine", "instance_data_dir": "photos", "resolution": SIDE, **square,
         "caption_strategy": "filename"},
        {"id": "others", "instance_data_dir": "small", "resolution": SMALL, "repeats": 2, **square,
         "caption_strategy": "textfile"},
        {"id": "texts", "type": "local", "dataset_type": "text_embeds", "cache_dir": "texts"},
    ]  # fmt: skip
    write("multidatabackend.json", json.dumps(backends))
    return import_data("multidatabackend.json"), {
        ("mine/red_house.png", "red house"): 1, ("mine/boat.png", "boat"): 1,
        ("others/a.png", "a house"): 3, ("others/b.png", "a ship"): 3,
    }  # fmt: skip


def kohya_toml() -> tuple[Sections, Drawn]:
    """kohya's --dataset_config: repeats, regularisation images, two resolutions."""
    draw("train/10_sks dog", a="sks dog, grass", b="sks dog, snow")
    draw("reg/1_dog", a="", b="")
    toml = f"""
[general]
caption_extension = ".txt"
batch_size = 2

[[datasets]]
resolution = {SIDE}
  [[datasets.subsets]]
  image_dir = "train/10_sks dog"
  num_repeats = 3

[[datasets]]
resolution = [{SMALL}, {SMALL}]
  [[datasets.subsets]]
  image_dir = "reg/1_dog"
  class_tokens = "dog"
  is_reg = true
"""
    write("dataset.toml", toml)
    return import_data("dataset.toml"), {
        ("10_sks-dog/a.png", "sks dog, grass"): 3, ("10_sks-dog/b.png", "sks dog, snow"): 3,
        ("1_dog/a.png", "dog"): 1, ("1_dog/b.png", "dog"): 1,
    }  # fmt: skip


def kohya_tree() -> tuple[Sections, Drawn]:
    """Folders that say repeats and caption; one image has a caption of its own."""
    draw("tree/3_sks dog", a="", b="sks dog, snow")
    draw("tree/1_cat", c="", d="")
    return {"data": {"images": "tree", "folder_repeats": True}}, {
        ("3_sks dog/a.png", "sks dog"): 3, ("3_sks dog/b.png", "sks dog, snow"): 3,
        ("1_cat/c.png", "cat"): 1, ("1_cat/d.png", "cat"): 1,
    }  # fmt: skip


def diffsynth_table() -> tuple[Sections, Drawn]:
    """DiffSynth-Studio's metadata.csv."""
    draw("images", a="", b="")
    write("images/metadata.csv", 'image,prompt\na.png,a boat\nb.png,"a cat, snow"\n')
    return {"data": {"images": "images"}}, {("a.png", "a boat"): 1, ("b.png", "a cat, snow"): 1}


def imagefolder() -> tuple[Sections, Drawn]:
    """Hugging Face's metadata.jsonl, of images in a subfolder."""
    draw("images/train", a="", b="")
    rows = ({"file_name": f"train/{name}.png", "text": f"a {name}"} for name in "ab")
    write("images/metadata.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return {"data": {"images": "images"}}, {("train/a.png", "a a"): 1, ("train/b.png", "a b"): 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SDXL."""
    folder = tmp_path_factory.mktemp("base")
    images = write_pictures(folder / "images", ["a house"], SIDE)
    prepare_inputs(make_image_config(images, family="sdxl"), folder, SIDE, steps=1)
    return folder / "base"


FOLDERS = (kohya_tree, diffsynth_table, imagefolder)
"""That nothing has to be imported for; tests/data/test_source_list.py reads each in CI."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        simpletuner_backends,
        kohya_toml,
        *(pytest.param(one, marks=pytest.mark.soak) for one in FOLDERS),
    ],
)
def test_other_programs_datasets_are_trained_from_as_they_are(
    given: Callable[[], tuple[Sections, Drawn]], base, server, tmp_path, monkeypatch
):
    """An epoch draws each image with its caption as often as that program does."""
    monkeypatch.chdir(tmp_path)
    found, drawn = given()
    train = {"resolution": SIDE, "global_batch_size": 2, "log_every": 1} | found.get("train", {})
    config = make_config(
        family="sdxl", data=found["data"], train=train, launch={"num_cpu_threads_per_process": 1},
        phases=[{"name": "a", "until": STEPS, "launch": "torch"}],
    )  # fmt: skip
    (tmp_path / "base").symlink_to(base)
    cache = encode_pixels(config, SIDE, tmp_path)
    dataset, launch = tmp_path / "dataset", tmp_path / "a/launch"
    settings = LaunchSettings.of(config, "a")
    render_launch(settings, dataset, PRESETS / "torch.yaml", base, None, launch)
    phase = read_run_yaml(launch / "run.yaml")
    assert phase.derived.epoch_size == sum(drawn.values())
    batches = Batches(cache, phase)
    names = [batches.name(position) for position in range(phase.derived.epoch_size)]
    captions = {one.file: one.caption for one in read_dataset(dataset).samples}
    assert Counter((name, captions[name]) for name in names) == drawn
    losses = Training(tmp_path, tmp_path, server).train("a")
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
