"""How many images and captions would be encoded: as many as the stage then encodes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.builders.caching import SIDE, FakeFamily, Run, load_fake_family

from zerotrain.artifact import file_sha256
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.graph.why.samples import compare_samples
from zerotrain.graph.why.work import Encodes, count_encodes
from zerotrain.models import families

BUCKETS = {"alignment": 8, "min_aspect": 0.25, "max_aspect": 4.0}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Twenty images with three captions, in a cache."""
    load_fake_family(monkeypatch)
    monkeypatch.setattr(families, "load_family", lambda name: FakeFamily())
    run = Run(tmp_path)
    run.cache()
    return run


def foresee(
    run: Run,
    data: dict[str, object] | None = None,
    cached: dict[str, object] | None = None,
    **given,
) -> Encodes:
    """What `zerotrain why` says before the stage runs."""
    config, dataset = run.config(data or {}, **(cached or {})), run.folder / "dataset"
    changes = compare_samples(config.data, dataset)
    assert changes is not None
    cache, settings = run.folder / "cache", CacheSettings.of(config)
    return count_encodes(cache, SIDE, changes.samples, settings, run.folder / "base", **given)


def encoded(text: str) -> tuple[int, ...]:
    """What the stage says of its last run: images encoded and all, captions encoded and all."""
    [*_, found] = re.findall(r"encoded (\d+) of (\d+) latents, (\d+) of (\d+) captions", text)
    return tuple(map(int, found))


def edit_caption(run: Run) -> None:
    (run.images / "03.txt").write_text("a new caption")


def edit_image(run: Run) -> None:
    Image.new("RGB", (30, 40), "red").save(run.images / "03.png")


def add_image(run: Run) -> None:
    Image.new("RGB", (30, 40), "red").save(run.images / "new.png")
    (run.images / "new.txt").write_text("house 1")


def remove_image(run: Run) -> None:
    for suffix in ("png", "txt"):
        (run.images / f"03.{suffix}").unlink()


def rename_image(run: Run) -> None:
    for suffix in ("png", "txt"):
        (run.images / f"03.{suffix}").rename(run.images / f"zz.{suffix}")


def duplicate_image(run: Run) -> None:
    for suffix in ("png", "txt"):
        (run.images / f"zz.{suffix}").write_bytes((run.images / f"03.{suffix}").read_bytes())


EDITS = {
    edit_caption: (0, 20, 1, 4),
    edit_image: (1, 20, 0, 3),
    add_image: (1, 21, 0, 3),
    remove_image: (0, 19, 0, 3),
    rename_image: (0, 20, 0, 3),
    duplicate_image: (0, 20, 0, 3),
}
"""Edits: images encoded and all, captions encoded and all; the stage's also has the empty one."""


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_the_count_is_what_is_encoded(run, capsys, edit):
    """Edits of the source."""
    edit(run)
    found = foresee(run)
    assert (found.images, found.of_images, found.captions, found.of_captions) == EDITS[edit]
    run.cache()
    images, of_images, captions, of_captions = encoded(capsys.readouterr().out)
    assert (images, of_images, captions, of_captions - 1) == EDITS[edit]


@pytest.mark.parametrize("data", [{"aspect_buckets": BUCKETS}, {"random_flip": True}])
def test_the_count_follows_the_views_of_images(run, capsys, data):
    """With buckets, the image of another shape; with flips, the mirrored ones to train on."""
    Image.new("RGB", (60, 24), "red").save(run.images / "03.png")
    run.cache()
    found = foresee(run, data)
    run.cache(data=data)
    images, of_images, captions, _ = encoded(capsys.readouterr().out)
    assert (found.images, found.of_images, found.captions) == (images, of_images, captions)
    assert 0 < found.images < found.of_images


def test_the_count_follows_the_variants_of_crops(run, capsys):
    """All of them are counted, and none is encoded twice."""
    data = {"aspect_buckets": {**BUCKETS, "crop": "random", "crop_variants": 3}}
    run.cache(data=data)
    _, of_images, _, _ = encoded(capsys.readouterr().out)
    found = foresee(run, data)
    assert (found.images, found.of_images) == (0, of_images)
    assert of_images > 20


def test_the_count_follows_the_variants_of_captions(run, capsys):
    """A prefix changes all, and is no change once it is prepared; an edit then has its variants."""
    data = {"caption_prefix": "sks,", "shuffle_caption": True, "caption_variants": 2}
    assert foresee(run, data).captions > 3
    run.cache(data=data)
    assert foresee(run, data).captions == 0
    (run.images / "03.txt").write_text("one, two, three, four, five, six")
    found = foresee(run, data)
    run.cache(data=data)
    images, _, captions, of_captions = encoded(capsys.readouterr().out)
    assert (found.images, found.captions, found.of_captions + 1) == (images, captions, of_captions)
    assert captions in (1, 2)


def test_the_count_of_damaged_shards_and_other_encoders(run):
    """Exactly a damaged shard's items; all items of a dtype, of captions for their length; nothing
    is certain of a base that is built again."""
    shards = sorted((run.folder / "cache").glob("latents-*"))
    assert len(shards) > 1
    each = []
    for shard in shards:
        held = shard.read_bytes()
        shard.write_bytes(held[:-1])
        each.append(foresee(run).images)
        shard.write_bytes(held)
    assert min(each) > 0
    assert sum(each) == 20
    assert foresee(run, cached={"dtype": "bf16"}).images == 20
    run.train = {"long_captions": "chunk"}
    found = foresee(run)
    assert (found.images, found.captions) == (0, 3)
    again = str(foresee(run, again={"captions"}))
    assert again == "encodes 0 of 20 images and up to 3 of 3 captions"


def test_orphans_and_unfinished_shards_count_as_cached(run, capsys):
    """What was removed and comes back, a dtype that is switched back, a stopped encoding; new
    images of a shape that no sample has are read for that."""
    image, caption = (run.images / f"03.{suffix}" for suffix in ("png", "txt"))
    held = image.read_bytes()
    edit_image(run)
    caption.write_text("a new caption")
    run.cache()
    image.write_bytes(held)
    caption.write_text("house 0")
    found = foresee(run)
    assert (found.images, found.captions) == (0, 0)
    run.cache(dtype="bf16")
    assert foresee(run).images == 0
    assert foresee(run, cached={"dtype": "fp16"}).images == 20
    cache = run.folder / "cache"
    (cache / "partial").mkdir()
    shard = next(cache.glob("latents-*"))
    digest = file_sha256(shard)
    shard.rename(cache / "partial" / f"{digest}.safetensors")
    assert foresee(run, cached={"dtype": "bf16"}).images == 0
    for left in ("partial", "orphans"):
        shutil.rmtree(cache / left)
    run.cache(dtype="bf16")
    capsys.readouterr()
    run.cache()
    assert encoded(capsys.readouterr().out)[0] == foresee(run, cached={"dtype": "fp16"}).images


def test_another_background_encodes_the_transparent_images(run, capsys):
    """And no opaque one, also when they are new, or had another colour before."""
    for name, alpha in (("03", 0), ("04", 255), ("05", 10)):
        Image.new("RGBA", (30, 40), (200, 0, 0, alpha)).save(run.images / f"{name}.png")
    run.cache()
    for colour in ("#00ff00", "#0000ff", "#ffffff"):
        data = {"transparent_background": colour}
        found = foresee(run, data)
        capsys.readouterr()
        run.cache(data=data)
        assert found.images == encoded(capsys.readouterr().out)[0]
        assert found.images == (0 if colour == "#ffffff" else 2)
    Image.new("RGBA", (31, 40), (200, 0, 0, 0)).save(run.images / "04.png")
    data = {"transparent_background": "#0000ff"}
    found = foresee(run, data)
    run.cache(data=data)
    assert found.images == encoded(capsys.readouterr().out)[0] == 1
