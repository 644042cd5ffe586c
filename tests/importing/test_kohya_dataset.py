"""kohya's dataset configuration becomes the section `data`, and is cached from as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.builders.caching import encode_pixels
from tests.builders.images import write_pictures
from tests.builders.refusals import refused
from tests.builders.runs import make_run
from tests.importing.conftest import TOML

from zerotrain.config.data import BucketConfig, DataConfig
from zerotrain.config.read import parse_config
from zerotrain.data.buckets import bucket_sizes as sizes_taken
from zerotrain.data.dataset import read_dataset
from zerotrain.errors import PipelineError
from zerotrain.importers import files
from zerotrain.importers.imported_config import ImportedConfig, config_text
from zerotrain.importers.kohya_dataset import bucket_sizes
from zerotrain.importers.reading import import_file
from zerotrain.stages.prepare_dataset import prepare_dataset


@pytest.fixture
def toml(place: Path) -> Path:
    """Two folders: the first with caption files, the other without."""
    for folder in ("train", "reg"):
        (place / folder).mkdir()
    write_pictures(place / "train/10_sks dog", ["a dog, grass"], count=2)
    write_pictures(place / "reg/1_dog", ["x"], count=1)
    (place / "reg/1_dog/0.txt").unlink()
    (place / "dataset.toml").write_text(TOML)
    return Path("dataset.toml")


def read(toml: Path, *edits: tuple[str, str]) -> ImportedConfig:
    text = TOML
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    toml.write_text(text, encoding="utf-8")
    return import_file(toml)


def test_a_kohya_toml_is_cached_from_as_it_is(toml, tmp_path):
    """Every key of two datasets: folders, captions, repeats, flips, regularisation, sizes."""
    nested = read(toml).nested()
    assert nested["data"]["sources"] == [
        {"name": "10_sks-dog", "images": "train/10_sks dog", "repeats": 10, "random_flip": True,
         "caption_extension": ".txt", "multiline_captions": "first"},
        {"name": "1_dog", "images": "reg/1_dog", "is_regularisation_data": True,
         "instance_prompt": "dog", "caption_strategy": "instanceprompt", "resolution": 16},
    ]  # fmt: skip
    assert nested["train"] == {"resolution": 32, "global_batch_size": 2}
    run = make_run(family="qwen_image", vae="identity", **nested)
    cache = encode_pixels(parse_config(run, "imported"), 32, tmp_path / "made")
    samples = read_dataset(tmp_path / "made/dataset").samples
    assert [(one.file, one.caption, one.repeats) for one in samples] == [
        ("10_sks-dog/0.png", "a dog, grass", 10),
        ("10_sks-dog/1.png", "a dog, grass", 10),
        ("1_dog/0.png", "dog", 1),
    ]
    assert [(one.target_size, one.is_regularisation_data) for one in cache.entries] == [
        ((32, 32), False), ((32, 32), False), ((16, 16), True),
    ]  # fmt: skip


def test_the_written_file_is_what_was_read(toml, tmp_path):
    """A list of sources with comments is YAML."""
    import yaml

    found = read(toml)
    assert yaml.safe_load(config_text(found)) == found.nested()


def test_one_subset_is_no_list(toml):
    one = TOML.partition("[[datasets]]\nresolution = [16")[0]
    toml.write_text(one.replace("resolution = 32", "resolution = 512\nenable_bucket = true"))
    data = import_file(toml).nested()["data"]
    sizes = data["aspect_buckets"].pop("sizes")
    assert data == {
        "images": "train/10_sks dog", "repeats": 10, "random_flip": True,
        "caption_extension": ".txt", "multiline_captions": "first",
        "aspect_buckets": {"alignment": 64},
    }  # fmt: skip
    assert sizes == bucket_sizes(512 * 512, 256, 1024, 64)


def test_caption_options_and_masks_are_those_of_this_program(toml):
    """keep_tokens counts only with variants; a shuffle is of stored variants and so changed."""
    found = read(
        toml,
        (
            "keep_tokens = 1",
            "keep_tokens = 2\nshuffle_caption = true\ncaption_tag_dropout_rate = 0.1\n"
            'caption_prefix = "sks,"\nalpha_mask = true',
        ),
    )
    expected = {
        "shuffle_caption": True, "caption_tag_dropout_rate": 0.1, "keep_tokens": 2,
        "caption_prefix": "sks,", "loss_mask": "alpha",
    }  # fmt: skip
    first, second = found.nested()["data"]["sources"]
    for source in (first, second):
        assert expected.items() <= source.items()
    assert {one.key for one in found.notes if one.outcome == "changed"} >= {"shuffle_caption"}


def test_separators_without_variants(toml):
    """A group of tags is written out; a separator of kept tags has no effect in kohya's scripts."""
    found = read(
        toml, ("keep_tokens = 1", 'keep_tokens_separator = "|||"\nsecondary_separator = ";;;"')
    )
    assert found.nested()["data"]["sources"][0]["caption_replacements"] == {";;;": ","}
    assert "keep_tokens_separator" in {one.key for one in found.notes if one.outcome == "no-op"}


def test_captions_in_a_metadata_file_are_trained(toml, tmp_path):
    """Of an image_dir with `metadata_file`, caption files are not read."""
    captions = {"0": {"caption": "a cat\nx", "tags": "b"}, "1.png": {"tags": "c"}}
    Path("meta.json").write_text(json.dumps(captions), encoding="utf-8")
    read(toml, ('class_tokens = "sks dog"', 'metadata_file = "meta.json"'))
    [first, _] = import_file(toml).nested()["data"]["sources"]
    assert first == {
        "name": "10_sks-dog", "images": "train/10_sks dog", "repeats": 10, "random_flip": True,
        "metadata": "meta.json", "multiline_captions": "first",
    }  # fmt: skip
    data = DataConfig(images="train/10_sks dog", metadata="meta.json", multiline_captions="first")
    prepare_dataset(data, tmp_path / "made")
    samples = read_dataset(tmp_path / "made").samples
    assert [(one.file, one.caption) for one in samples] == [("0.png", "a cat"), ("1.png", "c")]


def test_a_json_says_the_same(toml):
    import tomllib

    expected = read(toml).nested()
    Path("dataset.json").write_text(json.dumps(tomllib.loads(TOML)), encoding="utf-8")
    assert import_file(Path("dataset.json")).nested() == expected


def test_images_of_subfolders_are_reported(toml):
    """kohya's scripts read a folder alone."""
    write_pictures(Path("reg/1_dog/more"), ["x"], count=2)
    Path("reg/1_dog/more/0.txt").unlink()
    Path("reg/1_dog/more/1.txt").unlink()
    [told] = [one.reason for one in read(toml).notes if one.key == "image_dir" and one.reason]
    assert told.startswith("2 images in subfolders of reg/1_dog are trained on, too")


def test_a_folder_may_be_filled_later(toml):
    """It is read when the dataset is made."""
    for path in Path("train/10_sks dog").iterdir():
        path.unlink()
    settings = read(toml, ('class_tokens = "sks dog"', "")).nested()
    assert settings["data"]["sources"][0]["images"] == "train/10_sks dog"


def test_buckets_are_those_of_kohyas_scripts():
    """make_bucket_resolutions((512, 512)) of sd-scripts, by its page of numbers."""
    assert bucket_sizes(512 * 512, 256, 1024, 64) == [
        [256, 832], [256, 896], [256, 960], [256, 1024], [320, 704], [320, 768], [384, 640],
        [448, 576], [512, 512], [576, 448], [640, 384], [704, 320], [768, 320], [832, 256],
        [896, 256], [960, 256], [1024, 256],
    ]  # fmt: skip


def test_buckets_of_a_rectangle_have_its_area(toml):
    """make_bucket_resolutions((512, 768)): an image of exactly that size keeps it."""
    one = TOML.partition("[[datasets]]\nresolution = [16")[0]
    own = "resolution = [512, 768]\nenable_bucket = true\nmin_bucket_reso = 256"
    toml.write_text(one.replace("resolution = 32", own))
    found = import_file(toml)
    sizes = [tuple(size) for size in found.values["data.aspect_buckets.sizes"]]
    assert {(512, 768), (768, 512), (384, 1024), (1024, 384)} <= {*sizes}
    side = found.values["train.resolution"]
    config = BucketConfig(alignment=64, sizes=sizes)
    assert (512, 768) in sizes_taken(side, config)
    assert side * side < 1.05 * 512 * 768
    assert ("kept", "min_bucket_reso", 256) in {(n.outcome, n.key, n.given) for n in found.notes}


def test_limits_of_buckets_that_differ_are_reported(toml):
    """And images are enlarged in all datasets or in none."""
    limits = "enable_bucket = true\nbucket_reso_steps = 16\nmin_bucket_reso = 16"
    text = TOML.replace("resolution = 32", f"resolution = 32\nmax_bucket_reso = 64\n{limits}")
    text = text.replace("resolution = [16", f"{limits}\nresolution = [16")
    toml.write_text(text)
    changed = {(n.key, n.given) for n in import_file(toml).notes if n.outcome == "changed"}
    assert {("min_bucket_reso", 16), ("max_bucket_reso", 64), ("enable_bucket", True)} <= changed
    toml.write_text(text.replace(limits, f"{limits}\nbucket_no_upscale = true", 1))
    with pytest.raises(PipelineError, match="bucket_no_upscale is on for some datasets only"):
        import_file(toml)


def test_class_tokens_of_some_images_are_refused(toml):
    """Which images would get them is said."""
    Path("train/10_sks dog/1.txt").unlink()
    said = refused(read, toml).what
    assert said.startswith(
        "class_tokens: 1 of 2 images in train/10_sks dog have no .txt file, such as 1.png"
    )


def test_a_disk_in_the_place_of_a_folder_is_not_walked(toml, monkeypatch):
    """`image_dir = "/"` took minutes; what depends on all of its files is refused by its key."""
    monkeypatch.setattr(files, "MOST_ENTRIES", 1)
    assert not files.may_look("train")
    assert files.may_look("reg/1_dog")
    with pytest.raises(
        PipelineError, match="class_tokens: depends on all files of train/10_sks dog"
    ):
        read(toml)
