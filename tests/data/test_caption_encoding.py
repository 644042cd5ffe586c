"""Captions in other encodings than UTF-8: which they can be, and data.caption_encoding."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from tests.builders.refusals import refused
from tests.data.conftest import png

from zerotrain.config.data import DataConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.data.open import open_source
from zerotrain.run.lineage.chain import ArtifactIndex
from zerotrain.run.lineage.compare_source import compare_source
from zerotrain.stages.prepare_dataset import prepare_dataset


def test_the_encodings_that_decode_a_caption_are_named(images, found):
    """Each with what it would read around the first letter that is not ASCII."""
    texts = {
        "gbk": "一只橘猫坐在沙发上".encode("gbk"),
        "cp932": "窓のそばの猫".encode("cp932"),
        "latin": "a small café near the river".encode("latin-1"),
        "windows": "the cat … asleep".encode("cp1252"),
        "none": b"\xff\x00\x01",
    }
    folder = images(**dict.fromkeys(texts, "x"))
    for name, content in texts.items():
        (folder / f"{name}.txt").write_bytes(content)
    reasons = {name.removesuffix(".png"): one.reason for name, one in found(folder).items()}
    start = "caption {}.txt is not UTF-8 (byte 0x{} at position {}); data.caption_encoding: "
    assert (
        reasons["latin"]
        == start.format("latin", "e9", 11) + "latin-1 would read 'mall café near t'"
    )
    assert reasons["windows"] == start.format("windows", "85", 8) + (
        "cp1252 would read 'the cat … asleep'"
    )
    assert reasons["gbk"].startswith(
        start.format("gbk", "e9", 4) + "gbk would read '一只橘猫坐在沙发上', "
    )
    assert "cp932 would read '窓のそばの猫'" in reasons["cp932"]
    assert reasons["none"] == (
        "caption none.txt is not UTF-8 (byte 0xff at position 0), nor gbk, cp932, cp949, big5, "
        "latin-1 or cp1252"
    )


@pytest.mark.parametrize(
    ("encoding", "text", "kind"),
    [
        ("gbk", "一只橘猫", "files"), ("cp932", "窓の猫", ".csv"), ("latin-1", "un café", ".jsonl"),
        ("cp1251", "кот", ".json"),
    ],
)  # fmt: skip
def test_captions_are_read_in_their_encoding(images, tmp_path, encoding, text, kind):
    """They are the same samples as those of UTF-8."""
    identities = []
    for name in ("utf-8", encoding):
        folder = images(a="x")
        content = {
            "files": text,
            ".csv": f"file_name,text\na.png,{text}\n",
            ".jsonl": f'{{"file_name": "a.png", "text": "{text}"}}\n',
            ".json": f'[{{"file_name": "a.png", "text": "{text}"}}]',
        }[kind].encode(name)
        table = tmp_path / f"t{kind}"
        (folder / "a.txt" if kind == "files" else table).write_bytes(content)
        options = {} if kind == "files" else {"metadata": str(table)}
        options |= {"caption_encoding": encoding} if name == encoding else {}
        output = tmp_path / f"made-{name}"
        prepare_dataset(DataConfig.model_validate({"images": str(folder), **options}), output)
        dataset = read_dataset(output)
        assert [one.caption for one in dataset.samples] == [text]
        assert compare_source(dataset.artifact, ArtifactIndex(tmp_path)).findings == []
        identities.append(dataset.artifact.identity)
    assert identities[0] == identities[1]


def test_another_encoding_is_another_dataset(images, tmp_path):
    folder = images(a="x")
    (folder / "a.txt").write_bytes("猫".encode("gbk"))
    made = {}
    for encoding in ("gbk", "big5"):
        data = DataConfig(images=str(folder), caption_encoding=encoding)
        prepare_dataset(data, tmp_path / encoding)
        made[encoding] = read_dataset(tmp_path / encoding)
    assert made["gbk"].samples[0].caption == "猫"
    assert made["gbk"].artifact.identity != made["big5"].artifact.identity


def test_utf8_is_no_key_of_a_dataset():
    """Datasets that were prepared without the key stay what they are."""
    named = DataConfig(images="x", caption_encoding="UTF8")
    assert named == DataConfig(images="x")
    assert "caption_encoding" not in named.model_dump()


def test_captions_that_are_utf8_as_well_are_named(images, found):
    """In a folder of two encodings, those of UTF-8 would be read as other letters."""
    folder = images(a="小狗", b="x", c="ascii", d="橘猫坐在沙发上")
    (folder / "b.txt").write_bytes("橘猫".encode("gbk"))
    source = open_source(DataConfig(images=str(folder), caption_encoding="gbk"))
    captions = {one.file: one.caption for one in source.found()}
    assert captions["b.png"] == "橘猫"
    assert source.notes == [
        f"1 captions in {folder}, such as that of a.png, are UTF-8 as well as gbk, which "
        f"data.caption_encoding names, and become {captions['a.png'][:16]!r}"
    ]
    assert (
        "data.caption_encoding: utf-8 would read '橘猫坐在沙发上'"
        in found(folder, caption_encoding="gbk")["d.png"].reason
    )
    (folder / "a.txt").write_bytes("小狗".encode("utf-8-sig"))
    assert {one.file: one.caption for one in source.found()}["a.png"] == "小狗"
    assert source.notes == []


def test_a_file_in_another_encoding_than_the_key_says(images, found):
    folder = images(a="x")
    (folder / "a.txt").write_bytes("un café noir".encode("latin-1"))
    reason = found(folder, caption_encoding="cp949")["a.png"].reason
    assert reason == (
        "caption a.txt is not cp949 (byte 0xe9 at position 6); data.caption_encoding: latin-1 "
        "would read 'un café noir'"
    )


def test_a_table_in_another_encoding_names_it(images, found, tmp_path):
    table = tmp_path / "t.csv"
    table.write_bytes("file_name,text\na.png,un café noir\n".encode("latin-1"))
    error = refused(found, images(a=None), metadata=str(table))
    assert error.what == f"{table}: not UTF-8 (byte 0xe9 at position 27)"
    assert error.hint == (
        "data.caption_encoding: latin-1 would read 'g,un café noir'; or save it as UTF-8, say "
        f"with: iconv -f latin1 -t utf-8 {table} > new.csv"
    )


def test_captions_of_tar_shards_are_read_in_their_encoding(tmp_path):
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, content in (
            ("0.png", png()), ("0.txt", "橘猫".encode("gbk")),
            ("1.png", png()), ("1.json", '{"text": "花狗"}'.encode("gbk")),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    options = {"images": str(tmp_path), "source": "webdataset"}
    reasons = [one.reason or "" for one in open_source(DataConfig(**options)).found()]
    assert all("data.caption_encoding: gbk would read" in one for one in reasons)
    entries = open_source(DataConfig(**options, caption_encoding="gbk")).found()
    assert [one.caption for one in entries] == ["橘猫", "花狗"]


@pytest.mark.parametrize("encoding", ["utf-16", "klingon", "rot13", "utf-7", ""])
def test_what_is_no_encoding_of_captions_is_refused(encoding):
    with pytest.raises(ValueError, match="is no encoding of Python in which ASCII letters are"):
        DataConfig(images="x", caption_encoding=encoding)


@pytest.mark.parametrize("options", [{"source": "huggingface"}, {"caption_strategy": "filename"}])
def test_the_key_is_refused_where_no_text_file_is_read(options, tmp_path: Path):
    with pytest.raises(ValueError, match="caption_encoding is of text files"):
        DataConfig(images=str(tmp_path), caption_encoding="gbk", **options)
