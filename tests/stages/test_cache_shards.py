"""Several jobs encode a cache, a range of its keys each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.builders.caching import (
    SIDE,
    FakeFamily,
    Run,
    StopError,
    contents,
    load_fake_family,
    stop_encoding,
)

from zerotrain.cache import encoding
from zerotrain.cache.key_ranges import parse_range
from zerotrain.errors import PipelineError
from zerotrain.stages import cache_latents as stage
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset

COUNT = 4


@pytest.fixture
def family(family, monkeypatch) -> FakeFamily:
    """The family that the stage loads, with batches of one."""
    monkeypatch.setattr(encoding, "PIXELS_AT_A_TIME", SIDE * SIDE)
    return family


def call(run: Run, output: str, **given) -> Path:
    """Call the stage as the rules do, with what they delete deleted."""
    folder = run.folder / output
    (folder / "manifest.json").unlink(missing_ok=True)
    settings = CacheSettings.of(run.config({}))
    cache_latents(settings, SIDE, run.folder / "dataset", run.folder / "base", folder, **given)
    return folder


def encode_range(run: Run, number: int) -> Path:
    """Encode one range."""
    name = f"{number}-of-{COUNT}"
    return call(run, f"shards/{name}", only=parse_range(name), cache=run.folder / "merged")


def encode_in_ranges(run: Run) -> Path:
    """Encode all ranges, and the cache of them."""
    prepare_dataset(run.config({}).data, run.folder / "dataset")
    return call(run, "merged", shards=[encode_range(run, number) for number in range(COUNT)])


@pytest.mark.parametrize("shard_size", [1024, 2048, 2**20], ids=["16 files", "8 files", "1 file"])
def test_four_jobs_give_every_byte_of_one(run, family, capsys, shard_size):
    run.shard_size = shard_size
    alone = contents(run.cache())
    assert len(family.image_batches) == 20
    merged = encode_in_ranges(run)
    assert len(family.image_batches) == 40
    assert capsys.readouterr().out.endswith(
        "encoded 0 of 20 latents, 0 of 4 captions; the rest was in the cache\n"
    )
    assert contents(merged) == alone


def test_a_merge_links_the_files_of_the_jobs(run, family):
    run.shard_size = 1024
    merged = encode_in_ranges(run)
    assert {path.stat().st_nlink for path in merged.glob("*.safetensors")} == {2}


def test_an_edit_encodes_what_it_changed(run, family):
    encode_in_ranges(run)
    family.image_batches.clear()
    for name in ("03", "11"):
        Image.new("RGB", (20, 20), (int(name), 0, 0)).save(run.images / f"{name}.png")
    edited = encode_in_ranges(run)
    assert len(family.image_batches) == 2
    assert contents(edited) == contents(run.cache("fresh"))


def test_the_first_call_in_ranges_takes_what_the_cache_has(run, family):
    run.cache("merged")
    family.image_batches.clear()
    encode_in_ranges(run)
    assert family.image_batches == []


def test_a_job_that_was_stopped_goes_on_where_it_was(run, family, monkeypatch):
    run.shard_size = 1024
    prepare_dataset(run.config({}).data, run.folder / "dataset")
    encoded: dict[int, int] = {}
    for number in range(COUNT):
        encode_range(run, number)
        encoded[number] = len(family.image_batches)
        family.image_batches.clear()
    largest, whole = max(encoded.items(), key=lambda one: one[1])
    shutil.rmtree(run.folder / "shards")
    stop_encoding(family, 3, monkeypatch)
    with pytest.raises(StopError):
        encode_range(run, largest)
    written = [*(run.folder / f"shards/{largest}-of-{COUNT}/partial").glob("*.safetensors")]
    other = load_fake_family(monkeypatch)
    encode_range(run, largest)
    assert written
    assert len(other.image_batches) < whole


def test_what_other_software_encoded_is_encoded_again(run, family, capsys):
    alone = contents(run.cache())
    encode_in_ranges(run)
    shutil.rmtree(run.folder / "merged")
    ranges = [run.folder / f"shards/{number}-of-{COUNT}" for number in range(COUNT)]
    record = ranges[1] / "records/encoding.json"
    found = json.loads(record.read_text())
    found["software"]["versions.torch"] = "0.1"
    held = len([*ranges[1].glob("*.safetensors")])
    manifest = json.loads((ranges[1] / "manifest.json").read_text())
    record.write_text(json.dumps(found))
    manifest["files"]["records/encoding.json"] = {
        "sha256": stage.artifact.file_sha256(record), "bytes": record.stat().st_size,
    }  # fmt: skip
    (ranges[1] / "manifest.json").write_text(json.dumps(manifest))
    family.image_batches.clear()
    merged = call(run, "merged", shards=ranges)
    assert held
    assert 0 < len(family.image_batches) < 20
    assert f"{ranges[1]}: encoded by other software" in capsys.readouterr().out
    assert contents(merged) == alone


@pytest.mark.parametrize("name", ["4-of-4", "0-of-3", "1", "0-of-0"])
def test_names_of_no_range_are_refused(name):
    with pytest.raises(PipelineError) as caught:
        parse_range(name)
    assert caught.value.what == f"--shard: {name} is not a range of keys"
