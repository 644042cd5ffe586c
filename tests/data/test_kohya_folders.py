"""Folders named as kohya's, and the names of folders as captions."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.data.conftest import png

from zerotrain.config.data import DataConfig
from zerotrain.data.dataset import read_dataset
from zerotrain.run.lineage.chain import ArtifactIndex
from zerotrain.run.lineage.compare_source import compare_source
from zerotrain.stages.prepare_dataset import prepare_dataset


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree as kohya's scripts take it; one of its images has a caption file."""
    for number, name in enumerate(("10_sks dog/a", "10_sks dog/b", "2_old_cat/c")):
        path = tmp_path / "tree" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png((number, 0, 0)))
    (tmp_path / "tree" / "10_sks dog" / "b.txt").write_text("a dog on grass")
    return tmp_path / "tree"


def test_a_kohya_tree_is_prepared_as_it_is(tree, tmp_path):
    """The number is that of repeats; the name is the caption of an image without its own."""
    data = DataConfig(images=str(tree), folder_repeats=True)
    prepare_dataset(data, tmp_path / "dataset")
    dataset = read_dataset(tmp_path / "dataset")
    assert [(one.file, one.repeats, one.caption) for one in dataset.samples] == [
        ("10_sks dog/a.png", 10, "sks dog"),
        ("10_sks dog/b.png", 10, "a dog on grass"),
        ("2_old_cat/c.png", 2, "old_cat"),
    ]
    assert dataset.epoch_size == 22
    assert compare_source(dataset.artifact, ArtifactIndex(tmp_path)).findings == []


def test_other_folders_are_bad_samples(tree, found):
    """kohya's scripts leave them out with a warning; here they are counted."""
    for name in ("extra/d.png", "0_none/e.png", "10_sks dog/more/f.png", "g.png"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(png())
    bad = {one.file: one.reason for one in found(tree, folder_repeats=True).values() if one.reason}
    assert {*bad} == {"extra/d.png", "0_none/e.png", "10_sks dog/more/f.png", "g.png"}
    assert bad["extra/d.png"] == (
        "its folder 'extra' is not named REPEATS_NAME, as 10_cat (data.folder_repeats)"
    )


def test_repeats_are_read_only_where_asked(tree, found):
    entries = found(tree, caption_strategy="foldername")
    assert [(one.caption, one.repeats) for one in entries.values()] == [
        ("10_sks dog", 1), ("10_sks dog", 1), ("2_old_cat", 1),
    ]  # fmt: skip
    inside = found(tree / "2_old_cat", caption_strategy="foldername", folder_repeats=True)
    assert [(one.caption, one.repeats) for one in inside.values()] == [("old_cat", 2)]
