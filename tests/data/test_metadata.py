"""Tables of captions: both column pairs, all formats, and each mistake's words."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tests.data.conftest import png

from zerotrain.config.data import DataConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.data.metadata import read_metadata
from zerotrain.data.open import open_source, source_files
from zerotrain.errors import PipelineError
from zerotrain.run.lineage.chain import ArtifactIndex
from zerotrain.run.lineage.compare_source import compare_source
from zerotrain.stages.prepare_dataset import prepare_dataset


@pytest.mark.parametrize(
    "columns", [("file_name", "text"), ("image", "prompt"), ("file_name", "caption")]
)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json", ".parquet"])
def test_all_formats_take_both_column_pairs(images, found, tmp_path, columns, suffix):
    folder = images(a=None, b=None)
    rows = [("./b.png", ' a "red" house, old '), ("a.png", "ein Haus am Fluß\u2028zwei")]
    table = tmp_path / f"elsewhere{suffix}"
    if suffix == ".csv":
        quoted = [f'{file}, "{text.replace(chr(34), chr(34) * 2)}",9' for file, text in rows]
        head = f"{columns[0]},{columns[1]},score"
        table.write_bytes(("\ufeff" + "\r\n".join([head, *quoted])).encode())
    elif suffix == ".parquet":
        values = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
        parquet.write_table(pyarrow.table(values), table)
    else:
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
        text = "\n\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]"
        table.write_text(text + "\n")
    entries = found(folder, metadata=str(table))
    assert {name: (entry.caption, entry.reason) for name, entry in entries.items()} == {
        "a.png": ("ein Haus am Fluß\u2028zwei", None),
        "b.png": ('a "red" house, old', None),
    }


def test_a_table_in_the_folder_is_used_and_unread_caption_files_are_mentioned(images):
    folder = images(a="beside", b=None)
    (folder / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": "in the table"}\n{"file_name": "b.png", "text": "b"}'
    )
    source = open_source(DataConfig(images=str(folder)))
    assert [entry.caption for entry in source.found()] == ["in the table", "b"]
    assert source.notes == [
        f"captions come from {folder}/metadata.jsonl; 1 *.txt files in {folder} are not read"
    ]
    (folder / "metadata.csv").write_text("file_name,text\n")
    with pytest.raises(PipelineError, match=r"holds metadata\.csv and metadata\.jsonl"):
        source.found()


@pytest.mark.parametrize("name", ["metadata.parquet", "metadata.json"])
def test_a_later_form_of_table_is_read_in_a_folder_without_caption_files(images, found, name):
    """Caption files go before them."""
    folder = images(a=None)
    row = {"image": "a.png", "prompt": "in the table"}
    if name == "metadata.json":
        (folder / name).write_text(json.dumps([row]))
    else:
        parquet.write_table(pyarrow.Table.from_pylist([row]), folder / name)
    assert found(folder)["a.png"].caption == "in the table"
    images(a="beside")
    assert found(folder)["a.png"].caption == "beside"


def test_each_bad_row_is_reported_with_its_line(images, found, tmp_path):
    folder = images(good=None, twice=None, blank=None, comma=None, unnamed=None)
    (folder / "notes.md").write_text("")
    (folder / "sub").mkdir()
    (tmp_path / "secret.png").write_bytes(b"")
    (folder / "out").symlink_to(tmp_path)
    long_name = "a caption in the wrong column " * 10 + ".png"
    rows = [
        "good.png,a house",
        "twice.png,first",
        "sub/../twice.png,second",
        "missing.png,x",
        "../secret.png,x",
        "/etc/passwd.png,x",
        r"C:\photos\a.png,x",
        "out/secret.png,x",
        "blank.png,  ",
        ",x",
        "comma.png,a house, old",
        "notes.md,x",
        "sub,x",
        f"{long_name},x",
    ]
    table = tmp_path / "metadata.csv"
    table.write_text("\n".join(["file_name,text", *rows]))
    data = DataConfig(images=str(folder), metadata=str(table))
    entries = [entry for entry in open_source(data).found() if entry.file != "out"]
    assert {(entry.file, entry.reason) for entry in entries} == {
        ("good.png", None),
        ("twice.png", None),
        ("twice.png", "metadata.csv line 4: names the image again, after line 3"),
        ("missing.png", f"metadata.csv line 5: no such file in {folder}"),
        ("../secret.png", f"metadata.csv line 6: leaves {folder}"),
        (
            "/etc/passwd.png",
            f"metadata.csv line 7: absolute path; name files relative to {folder}",
        ),
        (
            r"C:\photos\a.png",
            f"metadata.csv line 8: absolute path; name files relative to {folder}",
        ),
        (
            "out/secret.png",
            f"metadata.csv line 9: leaves {folder} by a symbolic link "
            "(data.follow_symlinks: true would take it)",
        ),
        ("blank.png", "metadata.csv line 10: text is empty"),
        ("metadata.csv line 11", "no file_name"),
        (
            "comma.png",
            "metadata.csv line 12: more cells than columns; put text that holds a comma in "
            "double quotes",
        ),
        ("notes.md", "metadata.csv line 13: its extension is not that of an image"),
        ("sub", "metadata.csv line 14: a folder, not an image"),
        (long_name, f"metadata.csv line 15: no such file in {folder}"),
        ("unnamed.png", "no row of metadata.csv names it"),
    }


def test_a_row_naming_a_refused_link_counts_once(images, found, tmp_path):
    folder = images(a=None)
    (folder / "a.png").rename(tmp_path / "a.png")
    (folder / "a.png").symlink_to(tmp_path / "a.png")
    (folder / "metadata.csv").write_text("file_name,text\na.png,a house\n")
    entries = open_source(DataConfig(images=str(folder))).found()
    assert [entry.file for entry in entries] == ["a.png"]
    assert "leads out of the folder" in entries[0].reason


def test_values_that_are_no_text_are_reported(images, found, tmp_path):
    folder = images(a=None, b=None, c=None, d=None)
    rows = [
        {"file_name": "a.png", "text": ["one", 2]},
        {"file_name": "b.png", "text": None},
        {"file_name": "c.png", "text": "\ud800"},
        {"file_name": 7, "text": "x"},
        {"file_name": "d.png", "text": float("nan")},
    ]
    table = tmp_path / "t.jsonl"
    table.write_text("\n".join(json.dumps(row) for row in rows))
    entries = found(folder, metadata=str(table))
    assert {name: entry.reason for name, entry in entries.items()} == {
        "a.png": "t.jsonl line 1: item 2 of text is int, not text",
        "b.png": "t.jsonl line 2: no text",
        "c.png": "t.jsonl line 3: text is not valid Unicode",
        "t.jsonl line 4": "no file_name",
        "d.png": "t.jsonl line 5: no text",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"name,caption\na.png,x\n", "has the columns name,caption; file_name,text or"),
        (
            "t.csv",
            b"file_name;text\na.png;x\n",
            "has the columns file_name;text; file_name,text or",
        ),
        ("t.csv", b"file_name,text\n", "holds no rows"),
        ("t.csv", b"", "holds no rows"),
        ("t.csv", b'file_name,text\na.png,"open\nb.png,x\n', "line 2: not valid CSV"),
        ("t.csv", b"file_name,text\na.png,caf\xe9\n", "not UTF-8 (byte 0xe9 at position 24)"),
        ("t.jsonl", b'{"a": 1}\n', "has the columns a; file_name,text or image,prompt are needed"),
        ("t.jsonl", b'{"image": "a.png", "prompt": "x"}\n{"image"\n', "line 2: not valid JSON"),
        ("t.jsonl", b'["a.png", "x"]\n', "line 1: holds a list, not keys with values"),
        ("t.json", b'{"image": "a.png"}', "not a list of objects"),
        ("t.tsv", b"", "the extension is .tsv"),
        ("t.parquet", b"PAR1", "not readable as Parquet"),
    ],
)
def test_a_table_that_cannot_be_read(images, found, tmp_path, name, content, message):
    table = tmp_path / name
    table.write_bytes(content)
    with pytest.raises(PipelineError) as caught:
        found(images(a=None), metadata=str(table))
    assert str(table) in caught.value.what
    assert message in caught.value.what


def test_a_table_that_is_missing(images, found, tmp_path):
    with pytest.raises(PipelineError, match=r"data\.metadata: .*/none\.csv: no such file"):
        found(images(a=None), metadata=str(tmp_path / "none.csv"))


def test_an_image_is_not_its_own_condition(images, found, tmp_path):
    """The columns of images are those that name no conditioning images."""
    folder = images(a=None, b=None)
    table = tmp_path / "t.csv"
    options = {"metadata": str(table), "conditioning_columns": ["file_name"]}
    table.write_text("file_name,image,text,prompt\na.png,b.png,x,y\n")
    assert {(e.file, e.caption, e.conditioning) for e in found(folder, **options).values()} >= {
        ("b.png", "y", ("a.png",))
    }
    table.write_text("file_name,image,text\na.png,b.png,x\n")
    with pytest.raises(PipelineError, match=r"columns file_name,image,text; image,prompt are") as e:
        found(folder, **options)
    assert e.value.hint == "rename the columns of file names and captions to image,prompt"
    options["conditioning_columns"] = ["image", "file_name"]
    with pytest.raises(PipelineError, match="image, file_name leave no column for the images"):
        found(folder, **options)


def test_numbers_in_columns_that_are_not_read(tmp_path: Path) -> None:
    """JSON knows neither NaN nor numbers of 100 digits, and many programs write them."""
    row = '{"file_name": "a.png", "text": "a", "score": NaN, "id": ' + "9" * 100 + "}"
    for file, text in (("t.jsonl", f"{row}\n"), ("t.json", f"[{row}]")):
        (tmp_path / file).write_text(text)
        (found,) = read_metadata(tmp_path / file, tmp_path, {"a.png"})
        assert (found.file, found.caption, found.reason) == ("a.png", "a", None)


def _prepared(folder: Path, output: Path, **options: object) -> dict[str, tuple[str, ...]]:
    """The captions of each sample of a prepared dataset, by file."""
    prepare_dataset(DataConfig.model_validate({"images": str(folder), **options}), output)
    return {one.file: one.captions for one in read_dataset(output).samples}


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.json"])
def test_a_table_of_a_folder_of_imagefolder_is_read(images, tmp_path, name):
    """`folder/train/metadata.jsonl` names files beside it; planning sees an edit of it."""
    (tmp_path / "all").mkdir()
    folder = images(a=None, b=None).rename(tmp_path / "all" / "train").parent
    rows = [{"file_name": f"{one}.png", "text": f"a house, {one}"} for one in "ab"]
    lines = [json.dumps(row) for row in rows]
    text = "\n".join(lines) if name.endswith("l") else f"[{','.join(lines)}]"
    (folder / "train" / name).write_text(text)
    assert _prepared(folder, tmp_path / "dataset") == {
        "train/a.png": ("a house, a",), "train/b.png": ("a house, b",),
    }  # fmt: skip
    data = DataConfig(images=str(folder))
    assert str(folder / "train" / name) in source_files(data)
    dataset = read_dataset(tmp_path / "dataset").artifact
    assert compare_source(dataset, ArtifactIndex(tmp_path)).findings == []


def test_tables_of_several_folders_caption_their_own_images(images, found, tmp_path):
    folder = images()
    for name in ("cats", "dogs"):
        (folder / name).mkdir()
        (folder / name / "1.png").write_bytes(png())
        row = {"file_name": "1.png", "text": f"one of the {name}"}
        (folder / name / "metadata.jsonl").write_text(json.dumps(row))
    assert {one.file: one.caption for one in found(folder).values()} == {
        "cats/1.png": "one of the cats", "dogs/1.png": "one of the dogs",
    }  # fmt: skip
    _prepared(folder, tmp_path / "dataset")
    (folder / "dogs" / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "a wolf"}')
    dataset = read_dataset(tmp_path / "dataset").artifact
    (changed,) = compare_source(dataset, ArtifactIndex(folder)).findings
    assert (changed.problem, changed.path) == ("different", "dogs/metadata.jsonl: dogs/1.png")
    (folder / "1.png").write_bytes(png())
    with (folder / "dogs" / "metadata.jsonl").open("a") as stream:
        stream.write('\n{"file_name": "../cats/1.png", "text": "x"}\n{"text": "y"}\n')
    assert {(one.file, one.reason) for one in open_source(DataConfig(images=str(folder))).found()
            if one.reason} == {
        ("1.png", "no row of the 2 tables, such as cats/metadata.jsonl, names it"),
        ("cats/1.png", "dogs/metadata.jsonl: names the image again, after cats/metadata.jsonl"),
        ("dogs/metadata.jsonl line 3", "no file_name"),
    }  # fmt: skip


def test_several_splits_are_not_trained_as_one(images, found):
    folder = images()
    for name in ("train", "test"):
        (folder / name).mkdir()
        (folder / name / "1.png").write_bytes(png())
        (folder / name / "metadata.csv").write_text("file_name,text\n1.png,a house\n")
    with pytest.raises(PipelineError) as caught:
        found(folder)
    assert caught.value.what == f"data.images: {folder} has the splits test, train"
    assert caught.value.hint == f"name the folder of one: {folder}/train"


def test_names_with_backslashes_are_those_of_windows(images, found):
    """A file whose own name has one stays what it is."""
    folder = images(**{"own\\name": None})
    (folder / "sub").mkdir()
    (folder / "sub" / "a.png").write_bytes(png())
    (folder / "sub" / "edge.png").write_bytes(png())
    rows = [
        {"file_name": ".\\sub\\a.png", "text": "a house", "edge": "sub\\edge.png"},
        {"file_name": "own\\name.png", "text": "a boat", "edge": "sub/edge.png"},
        {"file_name": "..\\secret.png", "text": "x", "edge": "sub/edge.png"},
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    entries = found(folder, conditioning_columns=["edge"]).values()
    assert {(one.file, one.caption, one.conditioning) for one in entries if not one.reason} == {
        ("sub/a.png", "a house", ("sub/edge.png",)), ("own\\name.png", "a boat", ("sub/edge.png",)),
    }  # fmt: skip
    assert [(one.file, one.reason) for one in entries if one.reason] == [
        ("../secret.png", f"metadata.jsonl line 3: leaves {folder}")
    ]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json", ".parquet"])
def test_each_text_of_a_list_is_a_caption(images, tmp_path, suffix):
    """Training draws one of them; the first is measured. CSV has a list as JSON."""
    folder = images(a=None, b=None)
    table = tmp_path / f"t{suffix}"
    rows = [{"file_name": "a.png", "text": ["a cat", " two\ncats "]},
            {"file_name": "b.png", "text": ["a dog"]}]  # fmt: skip
    if suffix == ".csv":
        table.write_text(
            'file_name,text\na.png,"[""a cat"", "" two\\ncats ""]"\nb.png,"[""a dog""]"\n'
        )
    elif suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    else:
        lines = [json.dumps(row) for row in rows]
        table.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")
    options = {"metadata": str(table), "caption_prefix": "sks,", "holdout": 0}
    assert _prepared(folder, tmp_path / "dataset", **options) == {
        "a.png": ("sks, a cat", "sks, two\ncats"), "b.png": ("sks, a dog",),
    }  # fmt: skip
    dataset = read_dataset(tmp_path / "dataset").artifact
    assert compare_source(dataset, ArtifactIndex(tmp_path)).findings == []
    split = _prepared(folder, tmp_path / "split", multiline_captions="split", **options)
    assert split["a.png"] == ("sks, a cat", "sks, two", "sks, cats")


def test_brackets_in_a_csv_that_are_no_list_of_texts(images, found):
    folder = images(a=None, b=None, c=None)
    (folder / "metadata.csv").write_text(
        "file_name,text\na.png,[trigger] a cat [photo]\nb.png,[1]\nc.png,\"['a cat', 'a dog']\"\n"
    )
    assert {one.file: (one.caption, one.reason) for one in found(folder).values()} == {
        "a.png": ("[trigger] a cat [photo]", None),
        "b.png": ("[1]", None),
        "c.png": ("", "metadata.csv line 4: text is a list as Python prints it; "
                      'write it as JSON, ["a cat", "a dog"]'),
    }  # fmt: skip


def test_the_metadata_of_kohyas_scripts_is_read(images, tmp_path):
    """An object keyed by path, or by the name without extension; tags follow the caption."""
    folder = images(a=None, b=None, c=None)
    (folder / "sub").mkdir()
    (folder / "sub" / "d.png").write_bytes(png())
    table = tmp_path / "meta_cap.json"
    table.write_text(
        json.dumps(
            {
                "a": {"caption": "a cat", "train_resolution": [64, 64]},
                "b.png": {"tags": "cat, sofa", "image_size": [64, 64]},
                str(folder / "c.png"): {"caption": "a dog", "tags": "dog, grass"},
                "sub\\d": {"caption": ["a bird", "a pet"], "tags": "x", "score": 0},
            }
        )
    )
    data = DataConfig(images=str(folder), metadata=str(table))
    assert _prepared(folder, tmp_path / "dataset", metadata=str(table)) == {
        "a.png": ("a cat",), "b.png": ("cat, sofa",), "c.png": ("a dog, dog, grass",),
        "sub/d.png": ("a bird, x", "a pet, x"),
    }  # fmt: skip
    source = open_source(data)
    source.found()
    assert source.left_out.lines() == [
        "left out: key image_size of 1 row",
        "left out: key score of 1 row",
        "left out: key train_resolution of 1 row",
    ]


def test_mistakes_in_the_metadata_of_kohyas_scripts(images, found, tmp_path):
    folder = images(a=None, b=None)
    (folder / "b.jpg").write_bytes(png())
    table = tmp_path / "meta_cap.json"
    (folder / "d.png").write_bytes(png())
    rows = {"a": {"tags": ""}, "b": {"caption": "x"}, "c": {"caption": "y"}, "d": {"tags": ["z"]}}
    table.write_text(json.dumps(rows))
    assert {one.file: one.reason for one in found(folder, metadata=str(table)).values()} == {
        "a.png": "meta_cap.json item 1: no caption",
        "b": f"meta_cap.json item 2: several images of this name in {folder}: b.jpg, b.png",
        "c": f"meta_cap.json item 3: no such file in {folder}",
        "d.png": "meta_cap.json item 4: tags is list, not text",
        "b.jpg": "no row of meta_cap.json names it",
        "b.png": "no row of meta_cap.json names it",
    }
    table.write_text('{"a": "a cat"}')
    with pytest.raises(PipelineError, match="not a list of objects"):
        found(folder, metadata=str(table))
