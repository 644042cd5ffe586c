"""Datasets of Hugging Face on disk and tar shards of WebDataset, read in place."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet
from pydantic import ValidationError
from tests.builders.refusals import refused
from tests.data.conftest import png

from zerotrain.config.data import DataConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.data.dataset_folder import read_bad
from zerotrain.data.open import open_source, source_files, source_roots
from zerotrain.data.source import Found
from zerotrain.graph.checks.data import check_source
from zerotrain.run.lineage.chain import ArtifactIndex
from zerotrain.run.lineage.compare_source import compare_source
from zerotrain.stages.prepare_dataset import prepare_dataset

COLOURS = ((200, 0, 0), (0, 200, 0), (0, 0, 200))


def images() -> list[dict[str, Any]]:
    return [{"bytes": png(colour), "path": None} for colour in COLOURS]


def save(folder: Path, **columns: list[Any]) -> None:
    kinds = {"image": datasets.Image()}
    made = datasets.Dataset.from_dict({"image": images(), **columns})
    made.cast_column("image", kinds["image"]).save_to_disk(str(folder))


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **kind: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in kind.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, bytes]]) -> Path:
    folder.mkdir()
    for shard, members in shards.items():
        with tarfile.open(folder / shard, "w") as tar:
            for name, content in members.items():
                add(tar, name, content)
    return folder


def list_found(images: Path, source: str, **options: Any) -> dict[str, Found]:
    data = DataConfig(images=str(images), source=source, **options)  # type: ignore[arg-type]
    return {entry.file: entry for entry in open_source(data).found()}


def prepared(tmp_path: Path, images: Path, source: str) -> list[tuple[str, str, tuple[int, int]]]:
    """Name, caption and size of each sample; a trace of them finds nothing."""
    return prepare(tmp_path, DataConfig(images=str(images), source=source))  # type: ignore[arg-type]


def prepare(tmp_path: Path, data: DataConfig) -> list[tuple[str, str, tuple[int, int]]]:
    """The same of a section."""
    assert check_source(data) == []
    prepare_dataset(data, tmp_path / "dataset")
    dataset = read_dataset(tmp_path / "dataset")
    assert compare_source(dataset.artifact, ArtifactIndex(tmp_path)).findings == []
    opened = open_source(data)
    for sample, colour in zip(dataset.samples, COLOURS, strict=False):
        assert opened.image_of(sample.file, sample.image_sha256).getpixel((0, 0)) == colour
    return [(one.file, one.caption, one.original_size) for one in dataset.samples]


def test_a_saved_dataset_is_prepared_as_it_is(tmp_path):
    """Its own bytes are hashed and decoded, not those that the library would make of them."""
    save(tmp_path / "saved", caption=["a", "b", "c"])
    assert prepared(tmp_path, tmp_path / "saved", "huggingface") == [
        (f"0000000{row}", "abc"[row], (12, 10)) for row in range(3)
    ]
    [first, *_] = source_files(DataConfig(images=str(tmp_path / "saved"), source="huggingface"))
    assert first.endswith(".arrow")


def test_parquet_shards_are_one_dataset(tmp_path, monkeypatch):
    """With the hub's Image column, or with bytes in a structure."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    (tmp_path / "shards").mkdir()
    for shard, rows in enumerate((slice(0, 2), slice(2, 3))):
        table = pyarrow.table({"picture": images()[rows], "text": ["a", "b", "c"][rows]})
        parquet.write_table(table, tmp_path / f"shards/train-0000{shard}-of-00002.parquet")
    found = prepared(tmp_path, tmp_path / "shards", "huggingface")
    assert [caption for _, caption, _ in found] == ["a", "b", "c"]


def test_a_dataset_of_the_hub_is_prepared_by_its_id(tmp_path, monkeypatch):
    """Split and revision are asked for; a plan asks the hub for nothing; an id may have a dot."""
    save(tmp_path / "saved", text=["a", "b", "c"])
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, **chosen: str) -> datasets.Dataset:
        asked.append((name, subset, chosen))
        return datasets.load_from_disk(str(tmp_path / "saved"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = DataConfig(
        source="huggingface", path="owner/dogs-1.5", hub_split="test", revision="a1b2"
    )
    assert check_source(data) == []
    assert (source_files(data), source_roots(data), asked) == ([], [], [])
    assert prepare(tmp_path, data) == [(f"0000000{row}", "abc"[row], (12, 10)) for row in range(3)]
    assert {*map(str, asked)} == {
        str(("owner/dogs-1.5", None, {"split": "test", "revision": "a1b2"}))
    }  # fmt: skip


def test_image_files_of_the_hub_are_read_from_its_cache(tmp_path, monkeypatch):
    """A dataset of image files has their paths only; a path to any other file is a bad sample."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    paths = []
    for row, image in enumerate(images()):
        folder = tmp_path / ("hub" if row else "private")
        folder.mkdir(exist_ok=True)
        (folder / f"{row}.png").write_bytes(image["bytes"])
        paths.append(str(folder / f"{row}.png"))
    table = datasets.Dataset.from_dict({"image": paths, "text": ["a", "b", "c"]})
    saved = table.cast_column("image", datasets.Image())
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: saved)
    data = DataConfig(source="huggingface", path="owner/dogs", max_bad_samples=1)
    prepare_dataset(data, tmp_path / "dataset", 8)
    dataset = read_dataset(tmp_path / "dataset")
    assert [(one.file, one.caption) for one in dataset.samples] == [
        ("00000001", "b"), ("00000002", "c"),
    ]  # fmt: skip
    [bad] = read_bad(dataset.artifact)
    assert bad["file"] == "00000000"
    assert "outside the hub's cache" in bad["reason"]


def test_a_dataset_of_the_hub_that_is_gone_is_missing(tmp_path, monkeypatch):
    """Preparing names the key; a trace says what is missing, and of how many images."""
    save(tmp_path / "saved", text=["a", "b", "c"])
    data = DataConfig(source="huggingface", path="owner/dogs")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.load_from_disk(str(tmp_path / "saved"))
    )
    prepare(tmp_path, data)

    def refuse(*_: object, **__: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError("no such dataset")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    said = refused(prepare_dataset, data, tmp_path / "again").what
    assert said == "data.path: owner/dogs, split train: no such dataset"
    dataset = read_dataset(tmp_path / "dataset")
    [found] = compare_source(dataset.artifact, ArtifactIndex(tmp_path)).findings
    assert (found.problem, found.path, found.expected, found.found) == (
        "missing", "owner/dogs", "a dataset of 3 images", said,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"images": "saved"}, "give images, a folder, or path, a dataset of the hub, not both"),
        ({"source": "webdataset"}, "path means nothing to source: webdataset; remove it"),
        ({"prompt_column": "x"}, "prompt_column means nothing to source: huggingface; remove it"),
    ],
)
def test_keys_of_the_hub_are_refused_in_other_places(section, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**{"source": "huggingface", "path": "owner/dogs", **section})


def test_a_folder_is_no_dataset_of_the_hub(tmp_path):
    """Its files would not be followed."""
    data = DataConfig(source="huggingface", path=str(tmp_path))
    assert refused(open_source(data).found).hint == "name a folder in data.images"


def test_columns_of_a_saved_dataset_are_named(tmp_path):
    folder = tmp_path / "saved"
    save(folder, told=["a", " ", None], other=images())
    data = {"image_column": "image", "caption_column": "told"}
    found = list_found(folder, "huggingface", **data)
    assert [entry.reason for entry in found.values()] == [
        None, "told is empty", "no told",
    ]  # fmt: skip
    said = refused(list_found, folder, "huggingface").what
    assert said.startswith(f"data.caption_column: {folder} has no column text or caption or prompt")
    source = open_source(DataConfig(images=str(folder), source="huggingface", **data))
    source.found()
    assert source.left_out.lines() == ["left out: key other of 3 rows"]
    split = datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})})
    split.save_to_disk(str(tmp_path / "splits"))
    error = refused(list_found, tmp_path / "splits", "huggingface")
    assert error.hint == f"name the folder of one: {tmp_path / 'splits' / 'test'}"


def test_tar_shards_are_prepared_as_they_are(tmp_path):
    """A caption is a .txt, or in a .json; a name ends at its first dot."""
    red, green, blue = map(png, COLOURS)
    caption = json.dumps({"caption": "c", "score": 1}).encode()
    shards = {
        "train-000.tar": {"a.png": red, "a.txt": b" a ", "a.cls": b"1", "b.x.png": green,
                          "b.json": json.dumps({"prompt": "b"}).encode()},
        "train-001.tar": {"more/a.png": blue, "more/a.json": caption},
    }  # fmt: skip
    folder = write_shards(tmp_path / "shards", shards)
    assert prepared(tmp_path, folder, "webdataset") == [
        ("train-000/a.png", "a", (12, 10)),
        ("train-000/b.x.png", "b", (12, 10)),
        ("train-001/more/a.png", "c", (12, 10)),
    ]
    source = open_source(DataConfig(images=str(folder), source="webdataset"))
    source.found()
    assert source.left_out.lines() == [
        "left out: key score of 1 caption", "left out: key cls of 1 sample",
    ]  # fmt: skip
    assert source_files(DataConfig(images=str(folder), source="webdataset")) == [
        str(folder / name) for name in shards
    ]


def test_each_text_of_a_list_in_a_shard_is_a_caption(tmp_path):
    """In a column of a dataset, and in the .json of a tar shard."""
    save(tmp_path / "saved", text=[["a", "b"], ["c"], ["d", " e "]])
    row = json.dumps({"text": ["a", "b"]}).encode()
    shards = {"t.tar": {"0.png": png(COLOURS[0]), "0.json": row}}
    folder = write_shards(tmp_path / "shards", shards)
    entries = list_found(tmp_path / "saved", "huggingface").values()
    assert [one.captions for one in entries] == [("a", "b"), ("c",), ("d", "e")]
    assert list_found(folder, "webdataset")["t/0.png"].captions == ("a", "b")


def test_a_key_with_several_images_is_one_sample(tmp_path):
    """The one of the plain name; conditioning images and masks next to it are named."""
    red, green, blue = map(png, COLOURS)
    members = {
        "1.png": red, "1.cond.png": green, "1.mask.png": blue, "1.txt": b"one",
        "2.left.png": red, "2.right.png": green, "2.txt": b"two",
        "3.png": red, "3.jpg": green, "3.txt": b"three", "4.only.png": blue, "4.txt": b"four",
    }  # fmt: skip
    folder = write_shards(tmp_path / "shards", {"t.tar": members})
    source = open_source(DataConfig(images=str(folder), source="webdataset"))
    assert [(one.file, one.caption, one.reason) for one in source.found()] == [
        ("t/1.png", "one", None),
        ("t/2", "", "several images of this name in its shard"),
        ("t/3", "", "several images of this name in its shard"),
        ("t/4.only.png", "four", None),
    ]
    assert source.notes == [
        f"4 further images of samples in {folder}, such as t/1.cond.png: "
        "conditioning images and masks are read of `source: folder`"
    ]
    assert source.left_out.counts() == {
        "sample": {"cond.png": 1, "mask.png": 1, "left.png": 1, "right.png": 1}
    }


def test_members_that_are_no_plain_files_are_bad(tmp_path):
    """Links, names that leave the shard, captions without an image, images without a caption."""
    folder = tmp_path / "shards"
    folder.mkdir()
    with tarfile.open(folder / "t.tar", "w") as tar:
        add(tar, "link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "hard.png", type=tarfile.LNKTYPE, linkname="a.png")
        add(tar, "/root.png", png())
        add(tar, "../up.png", png())
        add(tar, "alone.txt", b"x")
        add(tar, "mute.png", png())
        add(tar, "list.png", png())
        add(tar, "list.json", b'{"text": ["a", 2]}')
    found = list_found(folder, "webdataset")
    assert {file.removeprefix("t/"): entry.reason for file, entry in found.items()} == {
        "link.png": "a link, to /etc/passwd",
        "hard.png": "a link, to a.png",
        "/root.png": "its name leaves the shard",
        "../up.png": "its name leaves the shard",
        "alone.txt": "a caption with no image of its name in its shard",
        "mute.png": "no caption: no t/mute.txt or .json in its shard",
        "list.png": "item 2 of t/list.json: text is int, not text",
    }
    (folder / "t.tar").write_bytes(b"not a tar")
    assert "write an uncompressed .tar" in refused(list_found, folder, "webdataset").hint


def test_keys_of_folders_mean_nothing_to_shards():
    with pytest.raises(ValueError, match="caption_extension means nothing to source: webdataset"):
        DataConfig(images="x", source="webdataset", caption_extension=".caption")
    with pytest.raises(ValueError, match="caption_column means nothing to source: folder"):
        DataConfig(images="x", caption_column="text")
    with pytest.raises(ValueError, match="source: huggingface needs `images`"):
        DataConfig(source="huggingface")
