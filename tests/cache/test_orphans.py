"""What a cache does not need now is kept, outside of the artifact, until it is pruned."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from tests.builders.caching import Run, contents
from tests.builders.talks import TALKS, cached

from zerotrain import artifact
from zerotrain.artifact import publication
from zerotrain.artifact.whole_file import exchange
from zerotrain.cache import record
from zerotrain.cache.reuse import orphan_shards
from zerotrain.machine.device import software

DONE = "encoded {} of {} latents, {} of {} captions; the rest was in the cache"


@pytest.fixture
def run(run) -> Run:
    """Eight images in shards of several each."""
    run.remove(*range(8, 20))
    return run


def _restore(removed: dict[Path, bytes]) -> None:
    for path, data in removed.items():
        path.write_bytes(data)


def _encoded(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_an_image_that_is_removed_and_added_again_is_encoded_once(run, family, capsys):
    """Orphans take only the room of what is not wanted, and the cache's bytes and identity are
    those of a cache that never had it."""
    whole = contents(run.cache())
    removed = run.remove(2, 5)
    (run.images / "01.txt").write_text("a tower")
    smaller = run.cache()
    assert contents(smaller) == contents(run.cache("fresh"))
    found = artifact.read(smaller, "cache")
    assert found.identity == artifact.read(run.folder / "fresh", "cache").identity
    shards = orphan_shards(smaller)
    assert sum(path.stat().st_size for path in shards) < 3 * 512  # two latents of 192 bytes
    _restore(removed)
    (run.images / "01.txt").write_text("house 1")
    capsys.readouterr()
    loads = family.loads
    assert contents(run.cache()) == whole
    assert (_encoded(capsys), family.loads) == (DONE.format(0, 8, 0, 4), loads)


def test_buckets_that_are_switched_on_and_off_encode_once(run, family, capsys):
    """Both ways: what the cache has is never an orphan as well."""
    buckets = {"aspect_buckets": {"alignment": 8}}
    square = contents(run.cache())
    wide = contents(run.cache(data=buckets))
    images = sum(family.image_batches)
    assert contents(run.cache()) == square
    assert contents(run.cache(data=buckets)) == wide
    assert sum(family.image_batches) == images
    size = sum(path.stat().st_size for path in orphan_shards(run.folder / "cache"))
    assert contents(run.cache()) == square
    assert contents(run.cache(data=buckets)) == wide
    assert sum(path.stat().st_size for path in orphan_shards(run.folder / "cache")) == size


@pytest.mark.parametrize("how", ["a flipped bit", "cut off"])
def test_a_damaged_orphan_is_ignored_and_named(run, family, capsys, how):
    run.cache()
    removed = run.remove(2)
    run.cache()
    [shard] = orphan_shards(run.folder / "cache")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data if how == "a flipped bit" else data[:20])
    _restore(removed)
    capsys.readouterr()
    assert contents(run.cache()) == contents(run.cache("fresh"))
    printed = capsys.readouterr()
    assert DONE.format(1, 8, 0, 4) in printed.out
    assert f"WARNING: {shard} is damaged; nothing is taken from it" in printed.err
    assert orphan_shards(run.folder / "cache") == []


def test_orphans_are_compared_after_an_upgrade(run, family, monkeypatch, capsys):
    """One that would be encoded to other numbers is encoded again, and never mixed in."""
    run.cache()
    removed = run.remove(2, 5)
    run.cache()
    changed = {"versions.torch": "9.9.9"}
    monkeypatch.setattr(record, "software", lambda packages: software(packages) | changed)
    run.cache()  # its own content is equal still; the orphans are of the version before
    family.scale = 1.5
    _restore(removed)
    capsys.readouterr()
    resumed = run.cache()
    assert ": 2 latents are encoded again; those of " in capsys.readouterr().out
    family.scale = 1.0
    assert not orphan_shards(resumed)


def test_a_kill_before_or_after_the_exchange_of_folders_loses_nothing(
    run, family, monkeypatch, capsys
):
    """Orphans are in the new folder before it replaces the old one."""
    run.cache()
    removed = run.remove(2, 5)
    before = contents(run.cache())
    kept = orphan_shards(run.folder / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(publication, "_swap_in", _killed)
        Image.new("RGB", (20, 20)).save(run.images / "01.png")
        with pytest.raises(KeyboardInterrupt):
            run.cache()
    assert orphan_shards(run.folder / "cache") == kept
    assert {n: b for n, b in contents(run.folder / "cache").items() if "partial" not in n} == before
    with monkeypatch.context() as patch:
        patch.setattr(publication, "_swap_in", _killed_after_exchange)
        with pytest.raises(KeyboardInterrupt):
            run.cache()
    assert len(orphan_shards(run.folder / "cache")) > len(kept)
    _restore(removed)
    capsys.readouterr()
    run.cache()
    assert _encoded(capsys) == DONE.format(0, 8, 0, 4)


def _killed(new: Path, folder: Path) -> None:
    raise KeyboardInterrupt


def _killed_after_exchange(new: Path, folder: Path) -> None:
    exchange(new, folder)
    raise KeyboardInterrupt


def test_examples_of_text_are_kept_too(bases, tmp_path, capsys):
    """A conversation that is removed and added again is tokenised once."""
    whole = contents(cached(tmp_path, bases["causal_lm"]).artifact.folder)
    cached(tmp_path, bases["causal_lm"], TALKS[1:])
    capsys.readouterr()
    again = cached(tmp_path, bases["causal_lm"]).artifact.folder
    assert f"tokenised 0 of {len(TALKS)} examples" in capsys.readouterr().out
    assert contents(again) == whole
