"""A folder of images with caption files: what is found, and each mistake's words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image
from tests.builders.refusals import refused

from zerotrain.config.data import DataConfig
from zerotrain.data.folder import folder_files
from zerotrain.data.listing import EXTENSIONS
from zerotrain.data.open import open_source
from zerotrain.errors import PipelineError


def files_of(folder: Path, **options: object) -> list[str]:
    """The rule inputs of a folder, relative to it."""
    data = DataConfig.model_validate({"images": str(folder), **options})
    return [os.path.relpath(file, folder) for file in folder_files(data)]


def test_captions_are_the_stripped_text_next_to_each_image(images, found):
    folder = images(b="  a red house \n", a="\ufeffa tree")
    (folder / "sub").mkdir()
    (folder / "a.png").rename(folder / "sub/C.PNG")
    (folder / "a.txt").rename(folder / "sub/C.TXT")
    entries = found(folder)
    assert {name: entry.caption for name, entry in entries.items()} == {
        "b.png": "a red house",
        "sub/C.PNG": "a tree",
    }
    assert all(entry.reason is None for entry in entries.values())


def test_order_does_not_depend_on_the_file_system(images, monkeypatch):
    folder = images(c="3", a="1", b="2")
    data = DataConfig(images=str(folder))
    in_order, files = open_source(data).found(), folder_files(data)
    assert [entry.file for entry in in_order] == ["a.png", "b.png", "c.png"]
    real = os.scandir

    class Backwards:
        def __init__(self, path):
            with real(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(os, "scandir", Backwards)
    assert open_source(data).found() == in_order
    assert folder_files(data) == files


def test_caption_mistakes_name_the_caption_file(images, found):
    folder = images(none=None, empty=" \n", latin="x", good="a house")
    (folder / "latin.txt").write_bytes("café".encode("latin1"))
    (folder / "lonely.txt").write_text("a caption")
    reasons = {name: entry.reason for name, entry in found(folder).items()}
    assert reasons == {
        "none.png": "no caption: no none.txt next to it",
        "empty.png": "caption empty.txt is empty",
        "latin.png": "caption latin.txt is not UTF-8 (byte 0xe9 at position 3); "
        "data.caption_encoding: latin-1 would read 'café'",
        "lonely.txt": "a caption file with no image next to it",
        "good.png": None,
    }


def test_caption_extension_is_the_configured_one(images, found):
    folder = images(a="text")
    (folder / "a.caption").write_text("caption")
    assert found(folder, caption_extension=".caption")["a.png"].caption == "caption"
    assert files_of(folder, caption_extension=".caption") == ["a.caption", "a.png"]


def test_hidden_files_are_no_samples(images, found):
    folder = images(a="text")
    (folder / "._a.png").write_bytes(b"resource fork")
    (folder / ".thumbnails").mkdir()
    (folder / ".thumbnails/a.png").write_bytes(b"")
    assert list(found(folder)) == ["a.png"]


def test_links_that_lead_out_are_refused_unless_asked_for(images, found, tmp_path):
    folder = images(a="text", b="other")
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / "b.png").rename(outside / "b.png")
    (folder / "b.png").symlink_to(outside / "b.png")
    (folder / "album").symlink_to(outside)
    (folder / "same.png").symlink_to("a.png")
    (folder / "same.txt").write_text("a link that stays inside")
    entries = found(folder)
    assert entries["b.png"].reason == (
        f"a link that leads out of the folder, to {outside}/b.png "
        "(data.follow_symlinks: true would take it)"
    )
    assert entries["album"].reason == (
        f"a link to a folder, to {outside} (data.follow_symlinks: true would take it)"
    )
    assert entries["same.png"].reason is None
    followed = found(folder, follow_symlinks=True)
    assert followed["b.png"].reason is None
    assert followed["album/b.png"].reason == "no caption: no album/b.txt next to it"


def test_links_in_a_circle_end(images, found):
    folder = images(a="text")
    (folder / "again").symlink_to(folder)
    assert list(found(folder, follow_symlinks=True)) == ["a.png"]


def test_file_names_with_braces_are_taken_and_others_than_utf8_reported(images, found):
    folder = images(a="text", **{"{b}": "braces"})
    assert found(folder)["{b}.png"].caption == "braces"
    with open(os.fsencode(folder) + b"/caf\xe9.png", "wb"):
        pass
    assert found(folder)["caf\\udce9.png"].reason == "its name is not UTF-8"
    renamed = folder.rename(folder.parent / "{images}")
    assert files_of(renamed) == ["a.png", "a.txt", "{b}.png", "{b}.txt"]


@pytest.mark.parametrize("act", [files_of, lambda folder: open_source(
    DataConfig(images=str(folder))).found()], ids=["source_files", "found"])  # fmt: skip
def test_a_folder_that_cannot_be_used(act, tmp_path):
    missing = tmp_path / "missing"
    error = refused(act, missing)
    assert error.what == f"data.images: {missing}: no such folder"
    assert "relative paths count from where snakemake runs" in error.hint

    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PipelineError, match=f"data.images: {file}: a file, not a folder"):
        act(file)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(act, empty).what == f"data.images: {empty}: no image in it or its subfolders"

    (empty / "a.txt").write_text("a caption")
    (empty / "movie.mp4").write_text("")
    with pytest.raises(PipelineError, match="subfolders; it holds 2 other files, such as a"):
        act(empty)


def test_rule_inputs_are_all_that_the_dataset_reads(images):
    folder = images(b="2", a="1", c=None)
    (folder / "notes.md").write_text("not a sample")
    assert files_of(folder) == ["a.png", "a.txt", "b.png", "b.txt", "c.png"]
    (folder / "metadata.csv").write_text("file_name,text\na.png,one\n")
    assert files_of(folder) == ["a.png", "b.png", "c.png", "metadata.csv"]


def test_an_image_can_be_opened_and_must_be_the_one_that_was_listed(images):
    folder = images(a="text")
    source = open_source(DataConfig(images=str(folder)))
    sha256 = source.sha256("a.png")
    assert source.image_of("a.png", sha256).getpixel((0, 0)) == (0, 100, 50)
    (folder / "a.png").write_bytes((folder / "a.png").read_bytes() + b" ")
    assert source.image_of("a.png", source.sha256("a.png")).size == (12, 10)
    error = refused(source.image_of, "a.png", sha256)
    assert error.what == f"{folder}: a.png changed since prepare_dataset"
    assert "run snakemake again" in error.hint
    (folder / "a.png").unlink()
    with pytest.raises(PipelineError, match=r"a\.png: no such file"):
        source.image_of("a.png", sha256)


@pytest.mark.parametrize("extension", [".apng", ".j2k", ".jfif", ".jp2", ".jpe", ".ppm", ".tga"])
def test_images_of_less_usual_names_are_read(images, extension):
    folder = images(a="text")
    Image.new("RGB", (8, 6), "red").save(folder / f"b{extension}")
    (folder / "b.txt").write_text("red")
    source = open_source(DataConfig(images=str(folder)))
    assert [entry.reason for entry in source.found()] == [None, None]
    name = f"b{extension}"
    assert source.image_of(name, source.sha256(name)).size == (8, 6)
    assert source.notes == []


def test_images_that_pillow_cannot_open_are_those_documented():
    """The second half of the list: it is there to be reported."""
    Image.init()
    opened = {name for name, kind in Image.EXTENSION.items() if kind in Image.OPEN}
    unread = {".cr2", ".cr3", ".dng", ".heic", ".heif", ".jxl", ".nef", ".svg"}
    assert set(EXTENSIONS) - opened == unread


def test_other_files_are_mentioned(images):
    folder = images(a="text")
    source = open_source(DataConfig(images=str(folder)))
    (folder / "movie.mp4").write_text("")
    source.found()
    assert source.notes == [f"1 other file in {folder}, such as movie.mp4, is not read"]
    (folder / "map.xcf").write_text("")
    (folder / "metadata.csv").write_text("file_name,text\na.png,one\n")
    (folder / "a.txt").unlink()
    for _ in range(2):
        source.found()
        assert source.notes == [f"2 other files in {folder}, such as map.xcf, are not read"]


def test_one_prompt_or_the_names_caption_every_image(images, found):
    """Caption files and tables are not read then; a name is its words."""
    folder = images(a_red_house="not read", b="not read")
    (folder / "b.txt").unlink()
    (folder / "metadata.csv").write_text("file_name,text\nb.png,not read\n")
    for options, expected in (
        ({"caption_strategy": "filename"}, ["a red house", "b"]),
        ({"caption_strategy": "instanceprompt", "instance_prompt": "sks dog"}, ["sks dog"] * 2),
    ):
        entries = found(folder, **options)
        assert [entries[name].caption for name in ("a_red_house.png", "b.png")] == expected
        assert files_of(folder, **options) == ["a_red_house.png", "b.png"]
        data = DataConfig.model_validate({"images": str(folder), **options})
        source = open_source(data)
        source.found()
        assert any("1 *.txt files" in note for note in source.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instance_prompt": "sks dog"}, "set caption_strategy, too"),
        ({"caption_strategy": "instanceprompt"}, "instance_prompt is missing"),
        ({"caption_strategy": "filename", "metadata": "a.csv"}, "filename reads no metadata"),
    ],
)
def test_captions_have_one_source(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"images": "photos", **options})


def test_notes_about_a_folder_are_no_captions(images):
    """A README.txt would be a caption without an image, and stop the run."""
    folder = images(a="a")
    for name in ("README.txt", "license.txt", "LICENSE-models.txt", "sub-readme.txt"):
        (folder / name).write_text("about")
    source = open_source(DataConfig(images=str(folder)))
    found = {entry.file: entry.reason for entry in source.found()}
    assert found == {"a.png": None, "sub-readme.txt": "a caption file with no image next to it"}
    assert source.notes == [f"3 other files in {folder}, such as LICENSE-models.txt, are not read"]
    Image.new("RGB", (8, 8)).save(folder / "README.png")
    assert "README.png" in [entry.file for entry in source.found() if entry.caption == "about"]


def test_masks_next_to_images_are_no_samples(images, tmp_path):
    """As OneTrainer has them; mask_images of the same folder reads them."""
    folder = images(a="a", b="b")
    for name, grey in (("a-masklabel", 128), ("b-masklabel", 255), ("a-condlabel", 0)):
        Image.new("L", (8, 8), grey).save(folder / f"{name}.png")
    source = open_source(DataConfig(images=str(folder)))
    assert [(entry.file, entry.reason) for entry in source.found()] == [
        ("a.png", None), ("b.png", None),
    ]  # fmt: skip
    assert source.notes == [
        f"{count} images in {folder}, such as {first}, belong to the one next to them and are not "
        f"read; `{key}: {folder}` reads them"
        for count, first, key in (
            (2, "a-masklabel.png", "mask_images"), (1, "a-condlabel.png", "conditioning_images"),
        )
    ]  # fmt: skip
    data = DataConfig(images=str(folder), mask_images=str(folder))
    source = open_source(data)
    assert [entry.mask for entry in source.found()] == ["a-masklabel.png", "b-masklabel.png"]
    assert str(folder / "b-masklabel.png") in folder_files(data)
    assert source.mask_source("a.png").read("a-masklabel.png").startswith(b"\x89PNG")
    data = DataConfig(images=str(folder), conditioning_images=str(folder))
    [first, second] = open_source(data).found()
    assert first.conditioning == ("a-condlabel.png",)
    assert second.reason == f"no conditioning image: no b.* in {folder}"
