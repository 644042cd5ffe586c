"""The guides' files where their commands look for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerotrain.importers.command_line import import_command
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.reading import ImportOptions, import_file

ROOT = Path(__file__).parents[2]
REFERENCES = Path(__file__).parent / "references"
PRESETS = ROOT / "config" / "launch"
QWEN = Path("examples/qwen_image/model_training/special/low_vram_training")

TOML = """
[general]
caption_extension = ".txt"
keep_tokens = 1
batch_size = 2

[[datasets]]
resolution = 32
  [[datasets.subsets]]
  image_dir = "train/10_sks dog"
  class_tokens = "sks dog"
  num_repeats = 10
  flip_aug = true

[[datasets]]
resolution = [16, 16]
  [[datasets.subsets]]
  image_dir = "reg/1_dog"
  class_tokens = "dog"
  is_reg = true
"""
"""A dataset configuration of kohya's scripts."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the guides' files at their places, and no cache of accelerate's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / QWEN).mkdir(parents=True)
    for file in (REFERENCES / "diffsynth").glob("*z*3*"):
        shutil.copy(file, tmp_path / QWEN)
    shutil.copy(REFERENCES / "peft" / "ds_zero3_cpu.yaml", tmp_path)
    shutil.copy(REFERENCES / "openmind" / "example_zero2.json", tmp_path / "ds_config.json")
    return tmp_path


@pytest.fixture
def imported(place: Path) -> Callable[..., ImportedConfig]:
    """Imports a guide's file or, by a name that ends in .sh, its commands."""

    def read(name: str, precision: str | None = None, **options: Any) -> ImportedConfig:
        options = ImportOptions(precision=precision, presets=PRESETS, **options)
        path = REFERENCES / name
        if path.suffix == ".sh":
            return import_command(path.read_text(), options)
        shutil.copy(path, place / path.name)
        return import_file(Path(path.name), options)

    return read


def leaves(values: Any) -> list[Any]:
    """Every value, however deep."""
    if isinstance(values, dict):
        return [leaf for value in values.values() for leaf in leaves(value)]
    if isinstance(values, list):
        return [leaf for value in values for leaf in leaves(value)]
    return [values]
