"""Conditioning images by folder and by column: which belong to an image, and what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.builders.refusals import refused
from tests.data.conftest import png

from zerotrain.config.data import DataConfig
from zerotrain.data.folder import folder_files
from zerotrain.data.open import open_source
from zerotrain.errors import PipelineError


def add(folder: Path, *names: str) -> Path:
    """Write images of these names into a folder."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png((9, number, len(name))))
    return folder


def config(folder: Path, **options: object) -> DataConfig:
    return DataConfig.model_validate({"images": str(folder), **options})


def inputs(folder: Path, **options: object) -> list[str]:
    """The rule inputs, relative to the parent of the image folder."""
    return [
        os.path.relpath(path, folder.parent) for path in folder_files(config(folder, **options))
    ]


def test_each_folder_gives_one_image_of_the_same_name(images, found, tmp_path):
    """In the order of the list, in subfolders, too, whatever the extension is."""
    folder = images(a="text")
    add(folder, "sub/b.png")
    (folder / "sub/b.txt").write_text("text")
    edges = add(tmp_path / "edges", "a.jpg", "sub/b.PNG")
    depth = add(tmp_path / "depth", "a.png", "sub/b.webp")
    (edges / "a.txt").write_text("no caption of ours")
    named = {"conditioning_images": [str(depth), str(edges)]}
    entries = found(folder, **named)
    assert {file: entry.conditioning for file, entry in entries.items()} == {
        "a.png": ("a.png", "a.jpg"),
        "sub/b.png": ("sub/b.webp", "sub/b.PNG"),
    }
    assert inputs(folder, **named) == [
        *("depth/a.png", "depth/sub/b.webp", "edges/a.jpg", "edges/sub/b.PNG"),
        *("images/a.png", "images/a.txt", "images/sub/b.png", "images/sub/b.txt"),
    ]
    source = open_source(config(folder, **named))
    for position, root in enumerate((depth, edges)):
        file = entries["a.png"].conditioning[position]
        assert source.conditioning_source(position).read(file) == (root / file).read_bytes()


def test_the_name_of_one_folder_is_a_list_of_it(images, found, tmp_path):
    folder, edges = images(a="text"), str(add(tmp_path / "edges", "a.png"))
    assert config(folder, conditioning_images=edges) == config(folder, conditioning_images=[edges])
    assert found(folder, conditioning_images=edges)["a.png"].conditioning == ("a.png",)


def test_a_sample_that_lacks_one_says_which(images, found, tmp_path):
    folder = images(none="x", two="x", led_out="x", no_caption=None)
    edges = add(tmp_path / "edges", "two.jpg", "two.png", "no_caption.png")
    (edges / "led_out.png").symlink_to(tmp_path / "elsewhere.png")
    add(tmp_path, "elsewhere.png")
    reasons = {
        file: entry.reason for file, entry in found(folder, conditioning_images=str(edges)).items()
    }
    assert reasons == {
        "none.png": f"no conditioning image: no none.* in {edges}",
        "two.png": f"2 conditioning images in {edges}: two.jpg and two.png",
        "led_out.png": f"conditioning image {edges}/led_out.png: a link that leads out of the "
        f"folder, to {tmp_path}/elsewhere.png (data.follow_symlinks: true would take it)",
        "no_caption.png": "no caption: no no_caption.txt next to it",
    }
    followed = found(folder, conditioning_images=str(edges), follow_symlinks=True)
    assert followed["led_out.png"].conditioning == ("led_out.png",)


def test_images_that_belong_to_none_are_mentioned(images, tmp_path):
    folder = images(a="text")
    edges = add(tmp_path / "edges", "a.png", "c.png", "b.png")
    source = open_source(config(folder, conditioning_images=str(edges)))
    source.found()
    assert source.notes == [
        f"2 conditioning images in {edges}, such as b.png, belong to no image and are not read"
    ]


@pytest.mark.parametrize("inner", ["images/edges", "."])
def test_a_folder_may_lie_in_that_of_the_images_or_hold_it(images, found, tmp_path, inner):
    """What is in it is no sample, and the images are no conditioning images."""
    folder = images(a="text", b="text")
    edges = add(tmp_path / inner, "a.jpg", "b.jpg")
    source = open_source(config(folder, conditioning_images=str(edges)))
    assert [(entry.file, entry.conditioning) for entry in source.found()] == [
        ("a.png", ("a.jpg",)),
        ("b.png", ("b.jpg",)),
    ]
    assert source.notes == []


@pytest.mark.parametrize("act", [folder_files, lambda data: open_source(data).found()])
def test_a_folder_that_cannot_be_used(images, act, tmp_path):
    folder, missing, empty = images(a="text"), tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    for place, why in ((missing, "no such folder"), (empty, "no image in it or its subfolders")):
        with pytest.raises(PipelineError) as caught:
            act(config(folder, conditioning_images=[str(place)]))
        assert caught.value.what == f"data.conditioning_images: {place}: {why}"


def table(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    """Write a table of captions; a list in a CSV is JSON."""
    if name.endswith(".csv"):
        lines = [",".join(rows[0])]
        for row in rows:
            cells = (
                value if isinstance(value, str) else json.dumps(value) for value in row.values()
            )
            lines.append(",".join('"' + cell.replace('"', '""') + '"' for cell in cells))
        text = "\n".join(lines)
    elif name.endswith(".jsonl"):
        text = "\n".join(map(json.dumps, rows))
    else:
        text = json.dumps(rows)
    (folder / name).write_text(text)


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "metadata.json"])
def test_columns_name_a_file_or_a_list_of_files(images, found, name):
    """Relative to the image folder; files that they alone name are no samples."""
    folder = add(images(), "a.png", "b.png", "from/a.jpg", "from/b.jpg", "mask/a.png", "mask/b.png")
    rows = [
        {"image": "a.png", "prompt": "one", "edit": "from/a.jpg", "mask": "mask/a.png"},
        {"image": "b.png", "prompt": "two", "edit": ["./from/b.jpg"], "mask": [" mask/b.png "]},
    ]
    table(folder, name, rows)
    options = {"metadata": str(folder / name), "conditioning_columns": ["edit", "mask"]}
    entries = found(folder, **options)
    assert {file: (entry.caption, entry.conditioning) for file, entry in entries.items()} == {
        "a.png": ("one", ("from/a.jpg", "mask/a.png")),
        "b.png": ("two", ("from/b.jpg", "mask/b.png")),
    }
    assert open_source(config(folder, **options)).conditioning_source(1).name == str(folder)
    table(folder, name, [{**rows[0], "edit": ["from/a.jpg", "from/b.jpg"]}, rows[1]])
    assert found(folder, **options)["a.png"].conditioning == (
        *("from/a.jpg", "from/b.jpg", "mask/a.png"),
    )


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("", "no edit"),
        ([], "no edit"),
        ("gone.png", "edit gone.png: no such file in {folder}"),
        (["b.png", "../b.png"], "edit ../b.png: leaves {folder}"),
        ("/b.png", "edit /b.png: absolute path; name files relative to {folder}"),
        ("notes.md", "edit notes.md: its extension is not that of an image"),
        ([1], "edit is neither a file name nor a list of them"),
        ([""], "edit is neither a file name nor a list of them"),
        ("[b.png]", "edit is not a JSON list (not valid JSON: Expecting value, line 1, column 2)"),
    ],
)
def test_mistakes_in_a_cell_name_their_line(images, found, cell, reason):
    """Other images that the row names right are no samples for all that."""
    folder = add(images(), "a.png", "b.png", "c.png")
    (folder / "notes.md").write_text("")
    table(
        folder,
        "metadata.jsonl",
        [
            {"file_name": "a.png", "text": "one", "edit": cell, "with": "b.png"},
            {"file_name": "c.png", "text": "two", "edit": "b.png", "with": "b.png"},
        ],
    )
    entries = found(folder, conditioning_columns=["with", "edit"])
    expected = f"metadata.jsonl line 1: {reason.format(folder=folder)}"
    assert {file: entry.reason for file, entry in entries.items()} == {
        "a.png": expected,
        "c.png": None,
    }


def test_a_table_without_the_column_is_refused_as_a_whole(images):
    folder = images(a=None)
    assert refused(folder_files, config(folder, conditioning_columns=["edit"])).what == (
        "data.conditioning_columns: edit: there is no table with columns, neither data.metadata "
        f"nor metadata.csv or metadata.jsonl in {folder}"
    )
    (folder / "metadata.csv").write_text("file_name,text\na.png,one\n")
    assert refused(open_source(config(folder, conditioning_columns=["edit"])).found).what == (
        f"data.conditioning_columns: {folder}/metadata.csv has no column 'edit'; it has "
        "file_name,text"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conditioning_images": "a", "conditioning_columns": ["b"]}, "not both"),
        ({"conditioning_images": "a", "random_flip": True}, "random_flip would mirror images"),
        ({"conditioning_columns": ["b"], "caption_strategy": "filename"}, "filename reads none"),
        ({"conditioning_images": 3}, "valid list"),
        ({"conditioning_images": []}, "at least 1 item"),
        ({"conditioning_images": ""}, "at least 1 character"),
        ({"images": None, "source": "digits", "conditioning_images": "a"}, "digits has no"),
        ({"images": None, "source": "sums", "conditioning_images": "a"}, "means nothing to"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"images": "photos", **options})
