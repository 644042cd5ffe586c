"""prepare_dataset: the manifest's numbers, its independence of chance, and its refusals."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from zerotrain.config import DataConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.errors import PipelineError
from zerotrain.stages.prepare_dataset import prepare_dataset


def write_image(file: Path, number: int, size: tuple[int, int] = (30, 20)) -> bytes:
    """Write a PNG that no other number gives; returns its bytes."""
    stream = io.BytesIO()
    Image.new("RGB", size, (number % 256, number // 256, 7)).save(stream, "PNG")
    file.write_bytes(stream.getvalue())
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images with captions."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(5):
        write_image(folder / f"{number}.png", number)
        (folder / f"{number}.txt").write_text(f"house {number % 2}")
    return folder


def prepare(folder: Path, **options: object) -> Path:
    """Prepare the folder; returns where."""
    output = folder.parent / "dataset"
    data = {"images": str(folder), "num_workers": 0, **options}
    prepare_dataset(DataConfig.model_validate(data), output)
    return output


def test_the_manifest_lists_hashes_sizes_crop_and_caption(folder, capsys):
    data = write_image(folder / "0.png", 99, size=(60, 20))
    dataset = read_dataset(prepare(folder, max_pixels=300, repeats=3))
    sample = dataset.samples[0]
    assert (sample.file, sample.caption, sample.split) == ("0.png", "house 0", "train")
    assert sample.image_sha256 == hashlib.sha256(data).hexdigest()
    assert sample.caption_sha256 == hashlib.sha256(b"house 0").hexdigest()
    assert (sample.original_size, sample.size, sample.crop) == ((60, 20), (30, 10), (20, 0, 20))
    assert (len(dataset.samples), dataset.epoch_size) == (5, 15)
    assert dataset.artifact.content["count"] == {"train": 5, "holdout": 0, "bad": 0}
    assert str(folder) not in json.dumps(dataset.artifact.content)
    assert capsys.readouterr().out == (
        "5 images to train on and 0 held out, with 2 different captions\n"
    )


def test_bytes_do_not_depend_on_workers_nor_on_the_order_of_files(folder):
    first = (prepare(folder, holdout=0.5) / "manifest.json").read_bytes()
    moved = [(file.name, file.read_bytes()) for file in folder.iterdir()]
    for name, _ in moved:
        (folder / name).unlink()
    for name, data in sorted(moved, reverse=True):
        (folder / name).write_bytes(data)
    assert (prepare(folder, holdout=0.5, num_workers=3) / "manifest.json").read_bytes() == first


def test_adding_images_moves_no_other_between_the_splits(folder):
    before = {s.file: s.split for s in read_dataset(prepare(folder, holdout=0.5)).samples}
    for number in range(100, 140):
        write_image(folder / f"{number}.png", number)
        (folder / f"{number}.txt").write_text("new")
    after = {s.file: s.split for s in read_dataset(prepare(folder, holdout=0.5)).samples}
    assert len(after) == 45
    assert {file: after[file] for file in before} == before
    assert set(after.values()) == {"train", "holdout"}


def test_bad_samples_are_refused_above_the_limit_and_listed(folder, capsys):
    (folder / "0.png").write_bytes(b"")
    (folder / "1.txt").unlink()
    with pytest.raises(PipelineError) as caught:
        prepare(folder, max_bad_samples=1)
    assert caught.value.what == (
        f"{folder}: 2 of 5 samples are bad, data.max_bad_samples allows 1:\n"
        "       0.png: empty file (0 bytes)\n"
        "       1.png: no caption: no 1.txt beside it"
    )
    assert "raise data.max_bad_samples" in caught.value.hint
    assert not (folder.parent / "dataset").exists()

    capsys.readouterr()
    output = prepare(folder, max_bad_samples=2)
    dataset = read_dataset(output)
    assert [sample.file for sample in dataset.samples] == ["2.png", "3.png", "4.png"]
    assert dataset.artifact.content["bad"] == [
        {"file": "0.png", "reason": "empty file (0 bytes)"},
        {"file": "1.png", "reason": "no caption: no 1.txt beside it"},
    ]
    assert dataset.artifact.content["count"]["bad"] == 2
    warning = capsys.readouterr().err
    assert "WARNING: 2 of 5 samples are bad and left out; `bad` in " in warning
    assert f"{output}/manifest.json lists them" in warning


def test_a_long_list_is_cut_in_the_message_only(folder):
    for number in range(20, 33):
        (folder / f"{number}.png").write_bytes(b"no image")
        (folder / f"{number}.txt").write_text("a caption")
    with pytest.raises(PipelineError) as caught:
        prepare(folder)
    assert caught.value.what.count("\n") == 11
    assert caught.value.what.endswith(
        "29.png: not an image that Pillow can read\n       and 3 more"
    )
    listed = read_dataset(prepare(folder, max_bad_samples=13)).artifact.content["bad"]
    assert len(listed) == 13


def test_nothing_left_to_train_on_is_refused(folder):
    for file in folder.glob("*.txt"):
        file.unlink()
    with pytest.raises(PipelineError, match="5 of 5 samples are bad, none is left"):
        prepare(folder, max_bad_samples=5)


def test_a_holdout_that_takes_everything_or_nothing_is_mentioned(folder, capsys):
    with pytest.raises(PipelineError, match=r"data\.holdout: 0\.9999 keeps all 5 images from"):
        prepare(folder, holdout=0.9999)
    prepare(folder, holdout=0.0001)
    assert "WARNING: data.holdout: 0.0001 of 5 images came to none" in capsys.readouterr().err


def test_notes_of_the_source_are_shown(folder, capsys):
    rows = "".join(f"{number}.png,from the table\n" for number in range(5))
    (folder / "metadata.csv").write_text("file_name,text\n" + rows)
    assert read_dataset(prepare(folder)).samples[4].caption == "from the table"
    assert "WARNING: captions come from" in capsys.readouterr().err


def test_caches_in_the_folder_stay(folder):
    cache = folder.parent / "dataset/cache/32/index.json"
    cache.parent.mkdir(parents=True)
    cache.write_text("{}")
    prepare(folder)
    assert cache.is_file()
