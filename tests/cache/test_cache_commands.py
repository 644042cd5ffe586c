"""zerotrain cache: show, prune and verify."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.builders.caching import Run, StopError, contents, stop_encoding
from tests.builders.talks import cached

from zerotrain.artifact import verdicts
from zerotrain.artifact.leftovers import WriterLock
from zerotrain.cache.layout import read_index, shard_number
from zerotrain.cache.reader import read_cache
from zerotrain.cache.reuse import orphan_shards
from zerotrain.errors import PipelineError
from zerotrain.run.caches import find_caches, prune, show, verify


@pytest.fixture
def run(run, family, monkeypatch) -> Run:
    """Six images, of which the last two are gone again; each series is one shard."""
    run.shard_size = 2**20
    run.remove(*range(6, 20))
    run.cache()
    run.remove(4, 5)
    run.cache()
    monkeypatch.chdir(run.folder)
    return run


def _facts(folder: Path) -> dict[str, str]:
    return {line[2:13].strip(): line[14:] for line in list(show(folder))[1:]}


def test_show_counts_what_is_there(run):
    facts = _facts(run.folder / "cache")
    assert facts["samples"] == "4 (2 held out), 4 latents, 4 captions"
    assert facts["sizes"] == "16x16: 4"
    assert facts["stored as"] == "fp32, resolution 16"
    [shard] = (run.folder / "cache").glob("latents-*")
    assert facts["latents"] == f"1 shard, {shard.stat().st_size / 1e3:.1f} kB"
    [orphan] = orphan_shards(run.folder / "cache")
    assert facts["orphans"] == f"1 shard, {orphan.stat().st_size / 1e3:.1f} kB"
    assert facts["waiting"] == "none"
    assert "torch 2" in facts["made by"]
    assert facts["used by"] == "no run of config/"


def test_show_of_text(bases, tmp_path):
    cache = cached(tmp_path, bases["causal_lm"])
    facts = _facts(cache.artifact.folder)
    assert facts["samples"] == "5 rows of 5 conversations"
    assert facts["rows"] == "32 tokens at most"
    assert facts["base"].startswith(str(bases["causal_lm"]))


def test_prune_removes_orphans_and_nothing_else(run):
    """A dry run removes nothing; what the cache has stays as it is."""
    folder = run.folder / "cache"
    before = contents(folder)
    [size] = [path.stat().st_size for path in orphan_shards(folder)]
    said = f"1 orphan shard, {size / 1e3:.1f} kB"
    assert prune(folder, dry_run=True) == [f"{folder}: would remove {said}"]
    assert len(orphan_shards(folder)) == 1
    assert prune(folder) == [f"{folder}: removed {said}"]
    assert not (folder / "orphans").exists()
    assert contents(folder) == before
    assert prune(folder) == [f"{folder}: nothing to remove"]


def test_prune_keeps_what_an_interrupted_encoding_continues_from(run, family, monkeypatch):
    """Unless it is asked to remove that; what a killed process was writing always goes."""
    folder = run.folder / "cache"
    run.base(vae="2", text_encoder="1")
    run.shard_size = 1024
    with monkeypatch.context() as patch:
        stop_encoding(family, len(family.image_batches) + 3, patch)
        with pytest.raises(StopError):
            run.cache()
    waiting = sorted(folder.glob("partial/*.safetensors"))
    assert waiting
    (folder / "partial/unfinished-1").write_bytes(b"torn")
    said = prune(folder)
    assert "removed 1 orphan shard" in said[0]
    assert "removed 1 torn shard" in said[1]
    assert f"keeps {len(waiting)} unfinished shard" in said[2]
    assert sorted(folder.glob("partial/*.safetensors")) == waiting
    [pruned] = prune(folder, unfinished=True)
    assert f"removed {len(waiting)} unfinished shard" in pruned
    assert not (folder / "partial").exists()


def test_prune_leaves_a_cache_in_use_alone(run):
    """One that a job writes, or a training reads."""
    folder = run.folder / "cache"
    lock = WriterLock(folder)
    assert prune(folder) == [
        f"{folder}: a running job writes here or next to it; nothing is removed"
    ]
    lock.release()
    cache = read_cache(folder)
    assert prune(folder) == [f"{folder}: a training reads it; nothing is removed"]
    del cache
    assert "removed 1 orphan shard" in prune(folder)[0]


def test_verify_lists_damage_by_sample_and_the_next_plan_makes_it_again(run, monkeypatch):
    """A flipped bit under an old time is found by its hash alone; then the plan knows it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.folder))
    monkeypatch.setattr(verdicts, "SETTLED_SECONDS", 0.0)
    folder = run.folder / "cache"
    assert verify(folder).whole
    [shard] = folder.glob("latents-*")
    before, data = shard.stat(), bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_mtime_ns, before.st_mtime_ns))
    verdict = verify(folder)
    assert not verdict.whole
    assert verdict.lines[0].startswith(f"{shard}: sha256 ")
    assert verdict.lines[1:5] == [f"  0{number}.png: its latents" for number in range(4)]
    assert ": 1 of " in verdict.lines[5]
    run.cache()
    assert verify(folder).whole


def test_verify_names_a_sample_whose_other_crop_is_damaged(run):
    """Once, though more of it may be in the shard."""
    crops = {"alignment": 8, "crop": "random", "sizes": [[16, 8]], "crop_variants": 3}
    folder = run.cache("crops", data={"aspect_buckets": crops, "random_flip": True})
    for shard in folder.glob("latents-*"):
        shard.write_bytes(b"torn")
    named: dict[int, list[str]] = {}
    for line in verify(folder).lines:
        if found := re.search(r"latents-(\d{5})-of", line):
            samples = named.setdefault(int(found[1]), [])
        elif line.endswith("its latents"):
            samples.append(line.strip().partition(":")[0])
    index = read_index(folder)
    for entry in index.entries:
        others = (*(entry.other_latents or ()), *(entry.other_flipped or ()))
        for key in (entry.latents, *others):
            assert named[shard_number(key, index.latents.count)].count(entry.file) == 1


def test_verify_finds_a_missing_shard_of_captions_and_damaged_orphans(run):
    folder = run.folder / "cache"
    [orphan] = orphan_shards(folder)
    orphan.write_bytes(orphan.read_bytes()[:30])
    assert verify(folder).whole
    assert f"{orphan}: damaged; nothing is taken from it" in verify(folder).lines[0]
    shard = sorted(folder.glob("text-*"))[0]
    shard.unlink()
    verdict = verify(folder)
    assert not verdict.whole
    assert verdict.lines[0] == f"{shard}: listed in manifest.json but missing"
    assert verdict.lines[1].endswith(".png: its text")


def test_commands_name_what_they_were_given(tmp_path, monkeypatch):
    """A draft of a running job is no cache."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError, match="no cache at results/data/"):
        find_caches(None)
    Path("my/photos").mkdir(parents=True)
    with pytest.raises(PipelineError, match="my/photos: no cache"):
        find_caches("my/photos")
    place = Path("results/data/cats/cache/64")
    (place / "partial").mkdir(parents=True)
    (place.parent / ".64.new-1-2" / "partial").mkdir(parents=True)
    assert find_caches(None) == [place]
