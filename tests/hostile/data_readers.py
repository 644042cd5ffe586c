"""Readers of datasets: tables, shards, images, and those that an earlier run published."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
from PIL import Image
from pyarrow import parquet
from tests.builders.caching import encode_pixels, pixel_run
from tests.builders.images import make_pictures, write_pictures
from tests.builders.talks import publish_dataset
from tests.hostile.reader import Reader, vouch_for

from zerotrain.artifact.documents import LeftOut
from zerotrain.cache.reader import Cache, read_cache
from zerotrain.config.data import DataConfig
from zerotrain.data.conversation import read_conversations
from zerotrain.data.dataset import read_dataset
from zerotrain.data.decode import decode, read_size
from zerotrain.data.metadata import read_metadata
from zerotrain.data.open import open_source
from zerotrain.data.source import BadImageError
from zerotrain.data.text import read_conversations_of
from zerotrain.stages.prepare_dataset import prepare_dataset

IMAGES = ["0.png", "1.png"]
ROWS = [{"file_name": name, "text": f"a house, {name}", "edge": "1.png"} for name in IMAGES]
TALKS: dict[str, list[dict[str, Any]]] = {
    "alpaca": [{"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["a", "b"]]}],
    "chat": [{"messages": [{"role": "user", "content": "1+2?"},
                           {"role": "assistant", "content": "3"}]}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "a"},
                                    {"from": "gpt", "value": "b"}]}],
    "tools": [{"system": "c", "tools": [{"type": "function", "function": {"name": "add"}}],
               "messages": [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
                            {"role": "assistant", "content": None, "weight": 0, "reasoning": "d",
                             "tool_calls": [{"id": "1", "function": {
                                 "name": "add", "arguments": '{"x": 1}'}}]},
                            {"role": "tool", "content": "3", "tool_call_id": "1"},
                            {"role": "assistant", "content": "3", "train": True}]}],
    "calls": [{"tools": '[{"name": "add"}]',
               "conversations": [{"from": "human", "value": "a"},
                                 {"from": "function_call", "value": '{"name": "add"}'},
                                 {"from": "observation", "value": "b"},
                                 {"from": "gpt", "value": "c"}]}],
}  # fmt: skip


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_table(folder: Path) -> None:
    _write_lines(folder / "a.jsonl", ROWS)
    (folder / "a.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (folder / "a.csv").write_text(
        'file_name,text,edge\n0.png,"a, b",1.png\n1.png,c,"[""0.png""]"\n'
    )
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet")
    keyed = {"0": {"caption": ["a", "b"], "edge": "1.png"}, "1.png": {"tags": "c", "edge": "0.png"}}
    (folder / "keyed.json").write_text(json.dumps(keyed), encoding="utf-8")


def _read_table(folder: Path, file: Path) -> None:
    read_metadata(file, folder, IMAGES)
    read_metadata(file, folder, IMAGES, ["edge"])


def _write_talks(folder: Path) -> None:
    for name, rows in TALKS.items():
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        _write_lines(folder / f"{name}.jsonl", rows)
    (folder / "a.csv").write_text('instruction,output\n"add, now",3\nb,4\n')


def _read_talks(_: Path, file: Path) -> None:
    counted = LeftOut()
    read_conversations_of(DataConfig(source="text", path=str(file)), counted)
    counted.lines()


def _write_shards(folder: Path) -> None:
    content = io.BytesIO()
    make_pictures(8, 1)[0].save(content, "png")
    picture = content.getvalue()
    members = {"0.png": picture, "0.txt": b"a house",
               "1.png": picture, "1.json": b'{"text": "a boat"}'}  # fmt: skip
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, held in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(held)
            tar.addfile(info, io.BytesIO(held))


def _read_shards(folder: Path, _: Path) -> None:
    source = open_source(DataConfig(images=str(folder), source="webdataset"))
    for found in source.found():
        if not found.reason:
            with contextlib.suppress(BadImageError):
                decode(source.read(found.file))


def _write_images(folder: Path) -> None:
    picture = make_pictures(8, 1)[0]
    for suffix in ("avif", "bmp", "gif", "jpg", "jp2", "ppm", "qoi", "tga", "tiff", "webp"):
        picture.save(folder / f"a.{suffix}")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.convert("RGBA").save(folder / "turned.png", exif=exif)
    picture.convert("I;16").save(folder / "grey.png")


def _read_image(_: Path, file: Path) -> None:
    for read in (read_size, decode):
        with contextlib.suppress(BadImageError):
            read(file.read_bytes())


def _write_datasets(folder: Path) -> None:
    write_pictures(folder / "files", ["a red house", "a boat"], count=3)
    prepare_dataset(DataConfig(images=str(folder / "files"), num_workers=0), folder / "images")
    publish_dataset(folder / "talks")


def _read_dataset(folder: Path, file: Path) -> None:
    """Read a dataset of images or of conversations."""
    kind = file.relative_to(folder).parts[0]
    vouch_for(folder / kind, file)
    dataset = (read_dataset if kind == "images" else read_conversations)(folder / kind)
    if dataset.samples:
        dataset.samples[0]
    list(dataset.split("train"))


def _write_cache(folder: Path) -> None:
    write_pictures(folder / "files", ["a red house", "a boat"], count=3)
    encode_pixels(pixel_run(folder / "files", 16, num_workers=0), 16, folder)


def _read_cache(folder: Path, file: Path) -> None:
    vouch_for(folder / "cache", file)
    found = read_cache(folder / "cache")
    assert isinstance(found, Cache)
    for place in range(len(found.entries)):
        found.sample(place)


DATA_READERS: dict[str, Reader] = {
    "captions": Reader(_write_table, _read_table),
    "conversations": Reader(_write_talks, _read_talks),
    "tar shards": Reader(_write_shards, _read_shards),
    "images": Reader(_write_images, _read_image, opens=False),
    "dataset": Reader(_write_datasets, _read_dataset, "[it]*/**/*"),
    "cache": Reader(_write_cache, _read_cache, "cache/*.*"),
}
