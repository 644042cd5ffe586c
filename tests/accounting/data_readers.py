"""Readers of datasets."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from PIL import Image
from pyarrow import parquet
from tests.accounting.reader import NAMED, Reader, Tell, more
from tests.builders.images import write_pictures
from tests.hostile.data_readers import TALKS

from zerotrain.artifact.documents import LeftOut
from zerotrain.config.data import DataConfig
from zerotrain.data.open import open_source
from zerotrain.data.text import read_conversations_of


def _notes(source: Any) -> str:
    found = source.found()
    reasons = [one.reason for one in found if one.reason]
    return "\n".join([*reasons, *source.notes, *source.left_out.lines()])


def _folder(folder: Path, name: str | None) -> str:
    write_pictures(folder / "images", ["a red house", "a boat"], count=2)
    if name is not None:
        (folder / "images" / f"{name}.mp4").touch()
    return _notes(open_source(DataConfig(images=str(folder / "images"))))


def _table(suffix: str) -> Tell:
    def tell(folder: Path, name: str | None) -> str:
        write_pictures(folder / "images", ["a red house", "a boat"], count=2)
        files = sorted(path for path in (folder / "images").glob("*.png"))
        for path in (folder / "images").glob("*.txt"):
            path.unlink()
        rows = [more({"file_name": path.name, "text": "a house"}, name) for path in files]
        table = folder / "images" / f"metadata{suffix}"
        if suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), table)
        elif suffix == ".csv":
            lines = [rows[0], *(row.values() for row in rows)]
            table.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
        else:
            table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return _notes(open_source(DataConfig(images=str(folder / "images"))))

    return tell


def _picture() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "png")
    return content.getvalue()


def _shards(key: Callable[[str], tuple[str, bytes]]) -> Tell:
    def tell(folder: Path, name: str | None) -> str:
        members = {"0.png": _picture(), "0.json": json.dumps({"caption": "a house"}).encode()}
        if name is not None:
            members |= dict([key(name)])
        with tarfile.open(folder / "a.tar", "w") as tar:
            for member, content in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return _notes(open_source(DataConfig(images=str(folder), source="webdataset")))

    return tell


def _saved(folder: Path, name: str | None) -> str:
    columns = more({"image": [{"bytes": _picture()}], "text": ["a house"]}, name, [1])
    datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image()).save_to_disk(
        str(folder / "saved")
    )
    return _notes(open_source(DataConfig(images=str(folder / "saved"), source="huggingface")))


def _rows(row: dict[str, Any], place: tuple[str | int, ...] = (), **options: str) -> Tell:
    def tell(folder: Path, name: str | None) -> str:
        changed = json.loads(json.dumps(row))
        part = changed
        for step in place:
            part = part[step]
        if name is not None:
            part[name] = "x"
        (folder / "a.jsonl").write_text(json.dumps(changed))
        data = DataConfig(source="text", path=str(folder / "a.jsonl"), **options)
        found, counted = read_conversations_of(data, left_out := LeftOut()), left_out.lines()
        return "\n".join([*(str(getattr(one, "reason", "") or "") for one in found), *counted])

    return tell


PREPARED = "`prepare_dataset`, `zerotrain data show`, the report"
TURN = {"name": "a", "value": "x"}
DATA_READERS: dict[str, Reader] = {
    "folder of images": Reader("files", NAMED, "`prepare_dataset`", _folder),
    **{
        f"metadata{suffix}": Reader("columns", NAMED, PREPARED, _table(suffix))
        for suffix in (".csv", ".jsonl", ".parquet")
    },
    "tar shard": Reader(
        "members of a sample", NAMED, PREPARED, _shards(lambda name: (f"0.{name}", b"1"))
    ),
    "caption in a tar shard": Reader(
        "keys of its JSON", NAMED, PREPARED,
        _shards(lambda name: ("0.json", json.dumps({"caption": "a", name: 1}).encode())),
    ),
    "saved or Parquet dataset of images": Reader("columns", NAMED, PREPARED, _saved),
    "rows of a chat": Reader("keys of a row", NAMED, PREPARED, _rows(TALKS["chat"][0])),
    "turns of a chat": Reader(
        "keys of a turn", NAMED, PREPARED, _rows(TALKS["chat"][0], ("messages", 1))
    ),
    "turns of ShareGPT": Reader(
        "keys of a turn", NAMED, PREPARED, _rows(TALKS["sharegpt"][0], ("conversations", 1))
    ),
    "parts of a turn": Reader(
        "keys of a part", NAMED, PREPARED, _rows(TALKS["tools"][0], ("messages", 0, "content", 0))
    ),
    "calls of tools": Reader(
        "keys of a call", NAMED, PREPARED,
        _rows(TALKS["tools"][0], ("messages", 1, "tool_calls", 0, "function")),
    ),
    "rows of Alpaca": Reader("columns", NAMED, PREPARED, _rows(TALKS["alpaca"][0])),
    "rows of named columns": Reader(
        "columns", NAMED, PREPARED,
        _rows({"a": "late", "b": "yes"}, prompt_column="a", response_column="b"),
    ),
}  # fmt: skip
