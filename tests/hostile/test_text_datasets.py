"""A dataset's further columns are not opened: no web request, no decoding."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from zerotrain.config.data import DataConfig
from zerotrain.config.image_source import ImageSourceConfig
from zerotrain.data.hub_datasets import hub_rows
from zerotrain.data.shards import HuggingFaceSource

URL = "http://127.0.0.1:9/a.png"
IMAGES = datasets.Image()


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection or decodes an image fails the test."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setattr(
        datasets.Image, "decode_example", lambda *_, **__: pytest.fail("an image was opened")
    )


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (IMAGES, URL),
        ([IMAGES], [URL]),
        ({"inner": [IMAGES]}, {"inner": [URL]}),
    ],
    ids=["column", "list", "nested"],
)
def test_further_columns_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind, value
) -> None:
    """Of a dataset of text, and of one of images, whose own column is not decoded either."""
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "image": IMAGES, "other": kind}
    )
    picture = {"bytes": b"data", "path": None}
    rows = {"prompt": ["a"], "image": [picture], "other": [value]}
    folder = tmp_path / "data"
    # The library would ask for the files' sizes and embed them.
    monkeypatch.setattr(datasets.Dataset, "_estimate_nbytes", lambda _: 1)
    monkeypatch.setattr(datasets.Image, "embed_storage", lambda _, storage, **__: storage)
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)
    found, _ = hub_rows(DataConfig(source="text", path=str(folder), prompt_template="alpaca"))
    assert [row for _, row in found] == [{"prompt": "a"}]
    source = HuggingFaceSource(
        ImageSourceConfig(source="huggingface", images=str(folder), image_column="image")
    )
    (one,) = source.found()
    assert source.read(one.file) == b"data"
