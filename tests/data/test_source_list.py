"""data.sources: several folders of images in one dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.builders.caching import encode_pixels
from tests.builders.images import write_pictures
from tests.builders.phases import make_tiny_phase
from tests.builders.refusals import refused
from tests.builders.runs import make_run

from zerotrain.cache.layout import Entry
from zerotrain.config.data import DataConfig
from zerotrain.config.read import parse_config
from zerotrain.data.dataset import Dataset, read_dataset
from zerotrain.data.draws import SampleOrder, repeat_in_rounds
from zerotrain.data.files import DatasetFiles, walk
from zerotrain.data.open import source_files
from zerotrain.graph.checks.data import check_source
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.run.lineage.chain import ArtifactIndex
from zerotrain.run.lineage.compare_source import compare_source
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.training.batches import Batches

SIDE = 16


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Three cats and two dogs, none equal to another."""
    write_pictures(tmp_path / "cats", ["a cat"], count=3)
    write_pictures(tmp_path / "dogs", ["a dog"], count=5)
    for number in range(3):
        (tmp_path / "dogs" / f"{number}.png").unlink()
        (tmp_path / "dogs" / f"{number}.txt").unlink()
    return tmp_path


def sources(folders: Path, **of_dogs: Any) -> dict[str, Any]:
    """A section of both; the cats are repeated three times."""
    return {
        "num_workers": 0,
        "sources": [
            {"name": "cats", "images": str(folders / "cats"), "repeats": 3},
            {"name": "dogs", "images": str(folders / "dogs"), **of_dogs},
        ],
    }


def prepare(folders: Path, data: dict[str, Any]) -> Dataset:
    prepare_dataset(DataConfig(**data), folders / "dataset")
    return read_dataset(folders / "dataset")


def test_samples_are_named_by_their_source(folders):
    """With repeats and marks of their own."""
    found = prepare(folders, sources(folders, max_pixels=64, is_regularisation_data=True))
    assert [(one.file, one.source, one.caption) for one in found.samples] == [
        *((f"cats/{number}.png", "cats", "a cat") for number in range(3)),
        *((f"dogs/{number}.png", "dogs", "a dog") for number in (3, 4)),
    ]
    assert [one.repeats for one in found.samples] == [3, 3, 3, 1, 1]
    assert [one.is_regularisation_data for one in found.samples] == [False] * 3 + [True] * 2
    assert [one.size for one in found.samples] == [(16, 16)] * 3 + [(8, 8)] * 2
    assert found.epoch_size == 11


def test_a_list_of_one_source_encodes_what_its_folder_does(folders):
    """Only the names of its samples differ."""

    def run(**data: Any) -> Any:
        return parse_config(
            make_run(
                family="qwen_image", vae="identity", data=data, train={"resolution": SIDE}
            ),
            "test",
        )  # fmt: skip

    cats = str(folders / "cats")
    alone = encode_pixels(run(images=cats), SIDE, folders)
    keys = [(one.latents, one.text) for one in alone.entries]
    listed = encode_pixels(run(sources=[{"name": "cats", "images": cats}]), SIDE, folders)
    assert [(one.latents, one.text) for one in listed.entries] == keys
    assert [one.file for one in listed.entries] == [f"cats/{one.file}" for one in alone.entries]


def test_folders_of_other_programs_are_cached_as_they_are(folders):
    """DiffSynth-Studio's metadata.csv, Hugging Face's imagefolder and kohya's tree, in one run."""
    for text in folders.glob("*/*.txt"):
        text.unlink()
    (folders / "cats" / "metadata.csv").write_text(
        "image,prompt\n" + "".join(f"{number}.png,cat {number}\n" for number in range(3))
    )
    (folders / "dogs" / "metadata.jsonl").write_text(
        "".join(f'{{"file_name": "{number}.png", "text": "a dog"}}\n' for number in (3, 4))
    )
    write_pictures(folders / "birds", ["x"], count=1)
    (folders / "birds" / "0.txt").unlink()
    (folders / "tree").mkdir()
    (folders / "birds").rename(folders / "tree" / "2_bird")
    section = sources(folders)
    section["sources"].append(
        {"name": "kohya", "images": str(folders / "tree"), "folder_repeats": True}
    )
    raw = make_run(family="qwen_image", vae="identity", data=section, train={"resolution": SIDE})
    cache = encode_pixels(parse_config(raw, "test"), SIDE, folders)
    samples = read_dataset(folders / "dataset").samples
    assert [(one.file, one.repeats) for one in cache.entries] == [
        *((f"cats/{number}.png", 3) for number in range(3)),
        ("dogs/3.png", 1), ("dogs/4.png", 1), ("kohya/2_bird/0.png", 2),
    ]  # fmt: skip
    assert [one.caption for one in samples] == [
        "cat 0", "cat 1", "cat 2", "a dog", "a dog", "bird",
    ]  # fmt: skip
    # The bird has the bytes of a cat.
    assert cache.artifact.content["count"] == {"samples": 6, "latents": 5, "captions": 6}


def test_each_source_has_its_resolution_and_flips(folders):
    """One folder in two sources is trained at two sizes; a batch has one of them."""
    section = sources(folders, images=str(folders / "cats"), resolution=8, random_flip=True)
    raw = make_run(family="qwen_image", vae="identity", data=section, train={"resolution": SIDE})
    cache = encode_pixels(parse_config(raw, "test"), SIDE, folders)
    assert [one.target_size for one in cache.entries] == [(16, 16)] * 3 + [(8, 8)] * 3
    assert [one.flipped is not None for one in cache.entries] == [False] * 3 + [True] * 3
    image = Image.open(folders / "cats" / "0.png").resize((8, 8), Image.Resampling.LANCZOS)
    expected = np.array(image).transpose(2, 0, 1) / 127.5 - 1
    found = cache.sample(3)["latents"].reshape(expected.shape).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    batches = Batches(cache, _phase(cache.entries, 3))
    names = [batches.name(position) for position in range(4 * 12)]
    for first in range(0, len(names), 3):
        assert len({name.partition("/")[0] for name in names[first : first + 3]}) == 1
    assert Counter(names) == {f"cats/{n}.png": 12 for n in range(3)} | {
        f"dogs/{n}.png": 4 for n in range(3)
    }


def test_fractional_repeats_take_other_images_in_each_epoch(folders):
    """A whole number makes no share; kohya's number of a folder counts, too."""
    (folders / "tree").mkdir()
    (folders / "dogs").rename(folders / "tree/5_dogs")
    data = sources(folders, repeats=0.5, folder_repeats=True)
    data["sources"][0]["repeats"] = "2.0"
    data["sources"][1]["images"] = str(folders / "tree")
    found = prepare(folders, data)
    assert [(one.repeats, one.share) for one in found.samples] == [(2, 1.0)] * 3 + [(1, 2.5)] * 2
    assert found.epoch_size == 6 + 5
    assert compare_source(found.artifact, ArtifactIndex(folders)).findings == []
    data["sources"][1]["repeats"] = 0.1
    run = make_run(family="qwen_image", vae="identity", data=data)
    cache = encode_pixels(parse_config(run, "test"), SIDE, folders / "made")
    phase = _phase(cache.entries, 1)
    batches = Batches(cache, phase)
    names = [batches.name(position) for position in range(2 * 7)]
    cats = {f"cats/{n}.png": 4 for n in range(3)}
    assert Counter(names) == cats | {f"dogs/5_dogs/{n}.png": 1 for n in (3, 4)}
    assert batches.describe_small_buckets() is None
    said = Batches(cache, phase.with_values(global_batch_size=4)).describe_small_buckets()
    assert said
    assert said.startswith("images with repeats: 0.5 have batches of their own, and 2 of 16x16 are")


def _phase(entries: Sequence[Entry], batch: int) -> ResolvedPhase:
    phase = make_tiny_phase("a", "torch", 4).with_values(global_batch_size=batch)
    epoch_size = sum(one.repeats for one in entries)
    return replace(phase, derived=replace(phase.derived, epoch_size=epoch_size))


def test_repeats_are_rounds_and_equal_ones_change_no_order():
    """Round r holds the samples with more than r repeats."""
    assert repeat_in_rounds(np.array([4, 5, 7]), np.array([1, 3, 2])).tolist() == [4, 5, 7, 5, 7, 5]
    train = np.array([3, 4, 8])
    twice = repeat_in_rounds(train, np.array([2, 2, 2]))
    order = SampleOrder(7, [np.arange(6)], 2)
    for position in range(20):
        _, place = order.place(position)
        assert twice[place % len(twice)] == train[place % len(train)]


def test_the_files_of_all_sources_are_inputs(folders):
    """Each once, also where two sources share a folder."""
    section = sources(folders, images=str(folders / "cats"))
    assert source_files(DataConfig(**section)) == sorted(map(str, (folders / "cats").iterdir()))


def test_the_listing_has_the_files_of_all_sources(folders):
    """An edit in either is found by its name; an unchanged dataset is not hashed again."""
    section = sources(folders)
    prepare(folders, section)
    data, place = DataConfig(**section), folders / "dataset"

    def changed() -> list[str]:
        walked = walk(data)
        found = DatasetFiles(data, place, walked).find_changes()
        assert found is not None
        return found.changed

    assert changed() == []
    assert DatasetFiles(data, place, walk(data)).are_unchanged()
    (folders / "dogs" / "3.txt").write_text("a wolf")
    assert changed() == [str(folders / "dogs" / "3.txt")]


def test_a_trace_names_the_changed_file_of_a_source(folders):
    data = prepare(folders, sources(folders))
    assert compare_source(data.artifact, ArtifactIndex(folders)).findings == []
    (folders / "dogs" / "3.txt").write_text("a wolf")
    (folders / "cats" / "0.png").unlink()
    found = compare_source(data.artifact, ArtifactIndex(folders)).findings
    assert [(one.problem, one.path) for one in found] == [
        ("missing", "cats/0.png"), ("different", "dogs/3.txt"),
    ]  # fmt: skip


def test_a_trace_from_another_folder_finds_the_masks_of_a_source(folders, monkeypatch):
    """Paths start from the project, wherever the trace is called."""
    write_pictures(folders / "masks", [""], count=3)
    data = sources(folders)
    data["sources"][0] |= {"images": "cats", "mask_images": "masks"}
    monkeypatch.chdir(folders)
    found = prepare(folders, data)
    assert all(one.mask_sha256 for one in found.samples[:3])
    monkeypatch.chdir("/")
    assert compare_source(found.artifact, ArtifactIndex(folders)).findings == []


def test_errors_name_the_source_and_its_key(folders):
    """A missing folder, an image without a caption, and keys in the wrong place."""
    gone = DataConfig(**sources(folders, images=str(folders / "gone")))
    said = refused(source_files, gone).what
    assert said == f"data.sources.dogs.images: {folders / 'gone'}: no such folder"
    (folders / "dogs" / "3.txt").unlink()
    [problem] = check_source(DataConfig(**sources(folders)))
    assert problem.what.startswith("data.sources: 1 of 5 samples are bad, and 0 may be bad (")
    said = refused(prepare, folders, sources(folders)).what
    assert said.endswith("dogs/3.png: no caption: no 3.txt next to it")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"repeats": 0.5}, "repeats"),
        ({"repeats": 2}, "with sources, repeats is a key of each of them; move it there"),
        ({"images": "x"}, "with sources, images is a key of each of them; move it there"),
        ({"source": "digits"}, "source: digits is read alone; remove it, or sources"),
        ({"of_dogs": {"name": "cats"}}, "sources: two are named cats; rename one"),
        ({"of_dogs": {"images": None}}, "needs `images`, the folder that holds them"),
        ({"of_dogs": {"conditioning_images": "e"}}, "conditioning images are not read from sev"),
        ({"of_dogs": {"resolution": 32}}, "data.sources.dogs.resolution: 32 is more than"),
        ({"of_dogs": {"max_pixels": 100}}, "data.sources.dogs.max_pixels is 100"),
    ],
)
def test_sources_are_refused_with_a_sentence(folders, section, message):
    data = sources(folders, **section.pop("of_dogs", {})) | section
    run = make_run(data=data, train={"resolution": SIDE})
    assert message in refused(parse_config, run, "test").what
