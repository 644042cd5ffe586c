"""A machine's processes read a copy of the cache; it changes nothing, and nothing is left of it."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotrain import artifact
from zerotrain.machine import disk
from zerotrain.training.process import scratch
from zerotrain.training.process.scratch import copy_of_cache


def publish(folder: Path, text: str) -> Path:
    """A cache of two files."""
    with artifact.publish(folder, "cache") as draft:
        (draft.folder / "index.json").write_text("{}")
        (draft.folder / "shard.safetensors").write_text(text)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache in a shared folder."""
    return publish(tmp_path / "shared", "numbers")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A machine's own disk."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_copy_is_the_cache_and_goes_at_the_end(cache: Path, place: Path) -> None:
    """Also where training fails; the sentence names it."""
    with copy_of_cache(str(place), cache) as (copy, said):
        assert copy.is_relative_to(place)
        assert contents(copy) == contents(cache)
        assert f"the cache is read from its copy {copy}" in said
    assert list(place.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), copy_of_cache(str(place), cache):
        raise KeyboardInterrupt
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("together", [False, True])
def test_trainings_of_a_machine_share_it(
    cache: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Two at once copy once; one of another content has its own; the last that reads removes.

    Two that find nothing in the same moment do so, too.
    """
    if together:
        is_whole, first = scratch._is_whole, iter(range(2))
        looked = threading.Barrier(2)

        def look(*words: Any) -> bool:
            whole = is_whole(*words)
            if next(first, None) is not None:
                looked.wait(20)
            return whole

        monkeypatch.setattr(scratch, "_is_whole", look)
    made: list[Path] = []
    make = scratch._make
    monkeypatch.setattr(scratch, "_make", lambda *words: (made.append(words[0]), make(*words)))
    other = publish(tmp_path / "other", "other numbers")
    both, end, found = threading.Barrier(3), threading.Event(), []

    def train() -> None:
        with copy_of_cache(str(place), cache) as (copy, _):
            found.append(copy)
            both.wait(20)
            end.wait(20)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    both.wait(20)
    assert len(made) == 1
    assert found[0] == found[1]
    with copy_of_cache(str(place), cache) as (copy, _):
        assert copy == found[0]
    with copy_of_cache(str(place), other) as (copy, _):
        assert contents(copy) == contents(other)
        assert contents(found[0]) == contents(cache)
    assert contents(found[0]) == contents(cache)
    end.set()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert list(place.iterdir()) == []


def left(place: Path, cache: Path) -> Path:
    """The copy that a killed training left."""
    with copy_of_cache(str(place), cache) as (copy, _):
        shutil.copytree(copy.parent, place / "aside")
    (place / "aside").rename(copy.parent)
    return copy


def test_what_a_killed_training_left_is_taken_over_or_removed(
    cache: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole copy of the same content is not made again; of another content it goes at once."""
    copy = left(place, cache)
    with monkeypatch.context() as patch:
        patch.setattr(scratch, "_make", None)
        with copy_of_cache(str(place), cache) as (found, _):
            assert found == copy
    assert list(place.iterdir()) == []
    left(place, cache)
    with copy_of_cache(str(place), publish(tmp_path / "other", "others")) as (found, _):
        assert [*place.iterdir()] == [found.parent]


def test_machines_that_share_the_folder_share_no_copy(
    cache: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems there are whose locks hold on one machine alone."""
    other = publish(tmp_path / "other", "others")
    abandoned = left(place, other).parent
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        with copy_of_cache(str(place), other) as (copy, _):
            assert copy.parent != abandoned
        with copy_of_cache(str(place), cache):
            assert abandoned.is_dir()
    assert list(place.iterdir()) == [abandoned]
    with copy_of_cache(str(place), cache):
        assert not abandoned.exists()


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_a_damaged_copy_is_made_again(cache: Path, place: Path, damage: str) -> None:
    """Compared by hash, not by size."""
    shard = left(place, cache) / "shard.safetensors"
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_text("NUMBERS" if damage == "changed" else "num")
    with copy_of_cache(str(place), cache) as (copy, _):
        assert contents(copy) == contents(cache)


def test_a_damaged_copy_that_is_read_is_left_alone(cache: Path, place: Path) -> None:
    """No one waits for the end of another training: the shared folder is there."""
    with copy_of_cache(str(place), cache) as (copy, _):
        (copy / "shard.safetensors").write_text("NUMBERS")
        with copy_of_cache(str(place), cache) as (found, said):
            assert found == cache
            assert "is damaged, and another training reads that" in said
        assert copy.is_dir()
    assert list(place.iterdir()) == []


def test_what_is_in_the_way_is_reported_and_the_shared_folder_read(
    cache: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy saves time alone: no reason to refuse a training."""

    def why(folder: str) -> str:
        with copy_of_cache(folder, cache) as (found, said):
            assert found == cache
        assert list(place.iterdir()) == []
        return said

    monkeypatch.delenv("JOB_DISK", raising=False)
    assert "the variable JOB_DISK is not set on" in why("$JOB_DISK")
    assert "away is no folder on this machine" in why(str(tmp_path / "away"))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "mount", lambda _: ("none", "tmpfs"))
        assert "is memory, no disk (tmpfs)" in why(str(place))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3))
        assert "has 0.0 kB free, its copy takes 0.0 kB" in why(str(place))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
        patch.setattr(scratch, "ThreadPoolExecutor", fail_as_a_full_disk)
        assert "No space left on device" in why(str(place))


def fail_as_a_full_disk(_: int) -> None:
    """Another job took the room meanwhile."""
    raise OSError(28, "No space left on device")


def test_a_training_that_is_to_stop_copies_no_further(cache: Path, place: Path) -> None:
    """It may take long."""
    with copy_of_cache(str(place), cache, lambda: True) as (found, said):
        assert found == cache
        assert "the training is to stop" in said
    assert list(place.iterdir()) == []


def test_the_disk_of_a_damaged_cache_is_not_believed(cache: Path, place: Path) -> None:
    """A copy is what the manifest says."""
    (cache / "shard.safetensors").write_text("NUMBERS")
    with copy_of_cache(str(place), cache) as (found, said):
        assert found == cache
        assert "has another hash than manifest.json says" in said


def test_a_disk_that_keeps_nothing_is_given_up(
    cache: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read from it is not what was written."""
    monkeypatch.setattr(scratch, "_is_whole", lambda *_: False)
    with copy_of_cache(str(place), cache) as (found, said):
        assert found == cache
        assert "was made 3 times, never whole" in said
    assert list(place.iterdir()) == []
