"""Each line of lines.txt: what a reader is given, and our values, the notes or the refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.builders.images import write_pictures
from tests.builders.refusals import refusal
from tests.importing.conftest import PRESETS, TOML

from zerotrain.importers.command_line import import_command
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.reading import ImportOptions, import_file

SETTINGS: dict[str, Any] = {
    "model_family": "flux", "model_type": "lora", "pretrained_model_name_or_path": "a/model",
    "max_train_steps": 100, "num_train_epochs": 0, "data_backend_config": "sets.json",
}  # fmt: skip
SIMPLETUNER: dict[str, Any] = {
    "pretrained_model_name_or_path": "a/model", "resolution": 1024, "max_train_steps": 100,
    "instance_data_dir": "images", "lr_scheduler": "constant",
}  # fmt: skip
DATASET: dict[str, Any] = {
    "id": "mine", "type": "local", "instance_data_dir": "photos", "crop": True,
    "crop_style": "center", "crop_aspect": "square", "resolution": 512, "resolution_type": "pixel",
    "caption_strategy": "filename",
}  # fmt: skip
CAPTIONS: dict[str, Any] = {
    "id": "mine", "type": "local", "instance_data_dir": "photos", "resolution": 32,
    "resolution_type": "pixel", "caption_strategy": "textfile", "instance_prompt": "sks",
}  # fmt: skip
EMBEDS = {"id": "texts", "dataset_type": "text_embeds", "default": True}
OPTIONS = ImportOptions(presets=PRESETS)


def file(name: str, found: Any) -> ImportedConfig:
    """A file with this content."""
    Path(name).write_text(json.dumps(found), encoding="utf-8")  # JSON is YAML
    return import_file(Path(name), OPTIONS)


def settings(given: dict[str, Any]) -> ImportedConfig:
    """SimpleTuner's config.json for a LoRA of Flux, next to its file of datasets."""
    Path("sets.json").write_text(json.dumps([DATASET, EMBEDS]), encoding="utf-8")
    return file("config.json", {**SETTINGS, **given})


def datasets(given: Any) -> ImportedConfig:
    """SimpleTuner's file of datasets, of one or several."""
    own = given if isinstance(given, list) else [given]
    return file("sets.json", [one if "dataset_type" in one else DATASET | one for one in own])


def flags(given: dict[str, Any]) -> str:
    """Flags of a command; the key "" is the script."""
    return " ".join(f"--{name} '{value}'" for name, value in given.items() if name)


def example(given: dict[str, Any]) -> ImportedConfig:
    """A command with one of diffusers' scripts."""
    usual = {"pretrained_model_name_or_path": "a/model", "max_train_steps": 9}
    start = "accelerate launch --mixed_precision bf16 --num_processes 1"
    return command(f"{start} {given['']} {flags({**usual, **given})}")


def command(text: str) -> ImportedConfig:
    """A pasted command line."""
    return import_command(text, OPTIONS)


def launched(given: Any) -> ImportedConfig:
    """A command with accelerate's YAML, and what stands after it."""
    own = {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "bf16", **given[0]}
    Path("own.yaml").write_text(json.dumps(own), encoding="utf-8")
    return command(f"accelerate launch --config_file own.yaml {given[1]}")


def kohya(edit: list[str]) -> ImportedConfig:
    """kohya's datasets after an edit, of two folders, the first with caption files."""
    for folder in ("train", "reg"):
        Path(folder).mkdir()
    write_pictures(Path("train/10_sks dog"), ["a dog, grass"], count=2)
    write_pictures(Path("reg/1_dog"), ["x"], count=1)
    Path("reg/1_dog/0.txt").unlink()
    Path("dataset.toml").write_text(TOML.replace(*edit), encoding="utf-8")
    return import_file(Path("dataset.toml"))


TRAINER = "torchrun finetune.py --model_name_or_path a/model --data_path a.json --max_steps 100"
DIFFSYNTH = "accelerate launch train.py --dataset_base_path d --model_id_with_origin_paths"
READERS: dict[str, Callable[[Any], ImportedConfig]] = {
    "settings": settings,
    "simpletuner": lambda given: file("config.json", {**SIMPLETUNER, **given}),
    "dataset": datasets,
    "captions": lambda given: file("sets.json", [CAPTIONS | given, EMBEDS]),
    "example": example,
    "trainer": lambda given: command(f"{TRAINER} {flags(given)}"),
    "diffsynth": lambda given: command(f"{DIFFSYNTH} {given[1]} {given[0]}"),
    "json": lambda given: file("a.json", given),
    "yaml": lambda given: file("a.yaml", given),
    "command": command,
    "launched": launched,
    "kohya": kohya,
}
LINES = [
    line
    for line in (Path(__file__).parent / "lines.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_what_comes_out(place: Path, line: str) -> None:
    """A text is a part of the refusal; null a key that is absent; @KEY the start of a note."""
    left, _, right = line.rpartition(" => ")
    reader, _, text = left.partition(" ")
    given, expected = json.loads(text), json.loads(right)
    if isinstance(expected, str):
        assert expected in refusal(READERS[reader], given)
        return
    found = READERS[reader](given)
    noted: dict[str, list[str]] = {}
    for note in found.notes:
        noted.setdefault(f"@{note.key}", []).append(f"{note.outcome} {note.reason}$")
    for key, value in expected.items():
        if key.startswith("@") and value is not None:
            assert any(one.startswith(value) for one in noted.get(key, [])), (key, noted.get(key))
        elif key.startswith("@"):
            assert key not in noted
        else:
            assert found.values.get(key) == value, key
    if isinstance(given, dict) and reader != "yaml":
        named = {key for key, value in given.items() if key and value != ""} - {"huggingface"}
        assert not [key for key in named if not any(key in one for one in noted)]
