"""prepare_dataset: the manifest's numbers, its independence of chance, and its refusals."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.builders.refusals import refused

from zerotrain import artifact
from zerotrain.config.data import DataConfig
from zerotrain.data.conversation import read_conversations
from zerotrain.data.dataset import ConditioningImage, read_dataset
from zerotrain.data.dataset_folder import read_bad
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


def prepare(folder: Path, *, resolution: int | None = None, **options: object) -> Path:
    """Prepare the folder; returns where."""
    output = folder.parent / "dataset"
    data = {"images": str(folder), "num_workers": 0, **options}
    prepare_dataset(DataConfig.model_validate(data), output, resolution)
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
        "square crop: drops 44% of all image area, most of 0.png (67%)\n"
    )


def test_conditioning_images_are_listed_with_hash_size_and_crop(folder, capsys):
    """Each cut to its own square, whatever the size of the image."""
    edges = folder.parent / "edges"
    edges.mkdir()
    data = [write_image(edges / f"{n}.png", 50 + n, size=(20, 40 + n)) for n in range(5)]
    dataset = read_dataset(prepare(folder, conditioning_images=[str(edges), str(edges)]))
    assert capsys.readouterr().out.startswith(
        "5 images to train on and 0 held out, each with 2 conditioning images, with 2 different "
        "captions\n"
    )
    write_image(edges / "1.png", 51, size=(300, 200))  # as the image, scaled
    prepare(folder, conditioning_images=str(edges))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "conditioning images: 4 of 5 have another aspect ratio than their image, so their squares "
        "show other parts (0.png 20x40, 0.png 30x20)"
    )
    sha256 = hashlib.sha256(data[3]).hexdigest()
    expected = ConditioningImage("3.png", sha256, (20, 43), (0, 11, 20))
    assert dataset.samples[3].conditioning == (expected, expected)
    assert dataset.conditioning_images == 2
    assert str(edges) not in json.dumps(dataset.artifact.content)


def test_without_conditioning_images_the_manifest_names_none(folder):
    """No key of theirs is in what it was made by."""
    dataset = read_dataset(prepare(folder))
    assert not [key for key in dataset.artifact.made_by["data"] if "conditioning" in key]
    assert dataset.conditioning_images == 0


def test_a_conditioning_image_that_cannot_be_read_makes_its_sample_bad(folder):
    """The reason names its file."""
    edges = folder.parent / "edges"
    edges.mkdir()
    for number in range(5):
        write_image(edges / f"{number}.png", number)
    (edges / "1.png").write_bytes(b"")
    (edges / "2.png").unlink()
    assert refused(prepare, folder, conditioning_images=str(edges)).what == (
        f"{folder}: 2 of 5 samples are bad, data.max_bad_samples allows 0:\n"
        f"       1.png: conditioning image {edges}/1.png: empty file (0 bytes)\n"
        f"       2.png: no conditioning image: no 2.* in {edges}"
    )


def test_a_transparent_conditioning_image_is_a_bad_sample(folder):
    """Over white a white square on nothing is an all-white mask. An opaque alpha is no matter."""
    masks = folder.parent / "masks"
    masks.mkdir()
    for number in range(5):
        alpha = 254 if number == 3 else 255
        Image.new("RGBA", (8, 8), (255, 255, 255, alpha)).save(masks / f"{number}.png")
    assert refused(prepare, folder, conditioning_images=str(masks)).what.splitlines()[1:] == [
        f"       3.png: conditioning image {masks}/3.png: has transparent pixels; save it without "
        "an alpha channel"
    ]


def test_with_buckets_a_conditioning_image_of_another_shape_is_a_bad_sample(folder):
    """Both sizes are named. A pixel more at twice the size is no other shape."""
    edges = folder.parent / "edges"
    edges.mkdir()
    for number, size in enumerate([(30, 20), (60, 40), (61, 41), (20, 30), (30, 21)]):
        write_image(edges / f"{number}.png", number, size=size)
    given: dict[str, Any] = {"conditioning_images": str(edges)}
    prepare(folder, **given)  # each is cut to its own square
    given["aspect_buckets"] = {"alignment": 8}
    assert refused(prepare, folder, **given).what.splitlines()[1:] == [
        f"       {number}.png: conditioning image {edges}/{number}.png: {size} pixels are of "
        "another aspect ratio than the 30x20 of its image, with which data.aspect_buckets cuts it"
        for number, size in ((3, "20x30"), (4, "30x21"))
    ]
    dataset = read_dataset(prepare(folder, **given, max_bad_samples=2))
    assert [sample.file for sample in dataset.samples] == ["0.png", "1.png", "2.png"]


def test_samples_with_different_numbers_of_conditioning_images_are_refused(folder):
    """Both are named."""
    lines = [
        json.dumps({"image": f"{n}.png", "prompt": "x", "edit": ["0.png", "1.png"][: 1 + (n < 3)]})
        for n in range(5)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    assert refused(prepare, folder, conditioning_columns=["edit"]).what == (
        "data.conditioning_columns: 0.png has 2 conditioning images and 3.png has 1"
    )
    assert not (folder.parent / "dataset").exists()


def test_small_and_duplicate_images_are_reported_and_leave_the_manifest_as_it_is(folder, capsys):
    before = prepare(folder) / "manifest.json"
    unchanged = before.read_bytes()
    prepare(folder, resolution=32)
    assert before.read_bytes() == unchanged
    (folder / "copy.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "copy.txt").write_text("a copy")
    capsys.readouterr()
    prepare(folder, resolution=32)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "enlarged images: 6 of 6 are smaller than 32 px and are enlarged, up to 1.6 times "
        "(0.png, 30x20)",
        "square crop: drops 33% of all image area, most of 0.png (33%)",
        "duplicate images: 1 of 6 have the same bytes as an earlier one (copy.png = 0.png)",
    ]


def test_bytes_do_not_depend_on_workers_nor_on_the_order_of_files(folder):
    first = (prepare(folder, holdout=0.5, num_workers=1) / "manifest.json").read_bytes()
    moved = [(file.name, file.read_bytes()) for file in folder.iterdir()]
    for name, _ in moved:
        (folder / name).unlink()
    for name, data in sorted(moved, reverse=True):
        (folder / name).write_bytes(data)
    assert (prepare(folder, holdout=0.5, num_workers=4) / "manifest.json").read_bytes() == first


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
    error = refused(prepare, folder, max_bad_samples=1)
    assert error.what == (
        f"{folder}: 2 of 5 samples are bad, data.max_bad_samples allows 1:\n"
        "       0.png: empty file (0 bytes)\n"
        "       1.png: no caption: no 1.txt next to it"
    )
    assert "raise data.max_bad_samples" in error.hint
    assert not (folder.parent / "dataset").exists()

    capsys.readouterr()
    output = prepare(folder, max_bad_samples=2)
    dataset = read_dataset(output)
    assert [sample.file for sample in dataset.samples] == ["2.png", "3.png", "4.png"]
    assert read_bad(dataset.artifact) == [
        {"file": "0.png", "reason": "empty file (0 bytes)"},
        {"file": "1.png", "reason": "no caption: no 1.txt next to it"},
    ]
    assert dataset.artifact.content["count"]["bad"] == 2
    warning = capsys.readouterr().err
    assert "WARNING: 2 of 5 samples are bad and left out; " in warning
    assert f"{output}/samples/bad.jsonl lists them" in warning


def test_a_long_list_is_cut_in_the_message_only(folder):
    for number in range(20, 33):
        (folder / f"{number}.png").write_bytes(b"no image")
        (folder / f"{number}.txt").write_text("a caption")
    error = refused(prepare, folder)
    assert error.what.count("\n") == 11
    assert error.what.endswith("29.png: not an image that Pillow can read\n       and 3 more")
    listed = read_bad(read_dataset(prepare(folder, max_bad_samples=13)).artifact)
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


def test_the_identity_is_that_of_one_json_with_all_samples(folder):
    """So caches, states and reports that name a dataset stay its, however columns are written."""
    edges = folder.parent / "edges"
    edges.mkdir()
    for number in range(1, 5):
        write_image(edges / f"{number}.png", number)
    output = prepare(folder, conditioning_images=str(edges), max_bad_samples=1, holdout=0.3)
    published = read_dataset(output)
    samples = [
        {**vars(one), "conditioning": [*map(vars, one.conditioning)]} for one in published.samples
    ]
    bad = read_bad(published.artifact)
    assert bad != []
    content = {**published.artifact.content, "samples": samples, "bad": bad}
    del content["identity"]
    expected = artifact.digest({"kind": "dataset", "files": {}, "content": content})
    assert published.artifact.identity == expected


def test_a_damaged_or_other_list_of_samples_is_refused(folder):
    """Instead of read as something else."""
    output = prepare(folder)
    file = output / "samples/samples.arrow"
    content = file.read_bytes()
    with pytest.raises(PipelineError, match=r"samples\.arrow: .*unknown columns"):
        read_conversations(output)
    file.write_bytes(content[:-9])
    assert refused(read_dataset, output).what.startswith(f"{file}: {len(content) - 9} bytes")
    file.write_bytes(content[:100] + b"?" + content[101:])
    assert refused(read_dataset, output).what.startswith(f"{file}: sha256 ")
