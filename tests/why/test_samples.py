"""How a source differs from its dataset, without reading what cannot have changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.builders.runs import make_config

from zerotrain.config.data import DataConfig
from zerotrain.data import files
from zerotrain.data.folder import FolderSource
from zerotrain.graph.why.samples import compare_samples
from zerotrain.stages.prepare_dataset import prepare_dataset


@pytest.fixture(autouse=True)
def walk_again() -> None:
    """A process walks through a folder once."""
    files.forget_walks()


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Eight images that are a dataset."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(8):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text(f"number {number}")
    data = make_config(data={"images": str(photos), "max_bad_samples": 1}).data
    prepare_dataset(data, tmp_path / "dataset")
    return data


def sentences(data: DataConfig) -> list[str]:
    changes = compare_samples(data, Path(str(data.images)).parent / "dataset")
    assert changes is not None
    return changes.sentences()


def test_each_kind_of_change_has_a_sentence(data):
    """A rename with a new caption is both; more than five names are counted."""
    photos = Path(str(data.images))
    (photos / "0.png").rename(photos / "zero.png")
    (photos / "0.txt").unlink()
    (photos / "zero.txt").write_text("nought")
    (photos / "7.txt").unlink()
    for number in range(1, 7):
        Image.new("RGB", (8, 8), (number, 9, 0)).save(photos / f"{number}.png")
    assert sentences(data) == [
        "6 images changed: 1.png, 2.png, 3.png, 4.png, 5.png and 1 more",
        "1 caption changed: zero.png",
        "1 image renamed: 0.png -> zero.png",
        "1 image unusable: 7.png (no caption: no 7.txt next to it)",
    ]


def test_only_images_that_are_new_are_read(data, monkeypatch):
    """Next to those that moved, which the listing hashes; without a listing all are hashed."""
    photos, read = Path(str(data.images)), []
    sha256 = FolderSource.sha256
    monkeypatch.setattr(
        FolderSource, "sha256", lambda self, file: read.append(file) or sha256(self, file)
    )
    (photos / "3.png").touch()
    assert sentences(data) == []
    assert read == []
    (photos / "3.png").rename(photos / "new.png")
    (photos / "3.txt").rename(photos / "new.txt")
    files.forget_walks()
    assert sentences(data) == ["1 image renamed: 3.png -> new.png"]
    assert read == ["new.png"]
    shutil.rmtree(photos.parent / "dataset" / files.FOLDER)
    assert sentences(data) == ["1 image renamed: 3.png -> new.png"]


def test_a_quick_look_gives_up_on_many_samples(data, monkeypatch):
    """More than a dry run may wait for."""
    dataset = Path(str(data.images)).parent / "dataset"
    assert compare_samples(data, dataset, quick=True) is not None
    monkeypatch.setattr("zerotrain.graph.why.samples.QUICK_SAMPLES", 7)
    assert compare_samples(data, dataset, quick=True) is None


def test_held_out_samples_and_names_train_nothing(data):
    """A training's data are the same after a rename that keeps the order, and with another caption
    of a held-out image."""
    photos = Path(str(data.images))
    (photos / "7.png").rename(photos / "8.png")
    (photos / "7.txt").rename(photos / "8.txt")
    changes = compare_samples(data, photos.parent / "dataset")
    assert changes is not None
    assert changes.trains_same
    (photos / "8.txt").write_text("eight")
    files.forget_walks()
    changes = compare_samples(data, photos.parent / "dataset")
    assert changes is not None
    assert (changes.trains_same, changes.trains_same_images) == (False, True)
