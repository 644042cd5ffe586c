"""A file's hash is remembered for as long as no one has written to the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain.artifact import verdicts
from zerotrain.artifact.damage import file_sha256

SIZE = 100


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed; all are large, and nothing was changed just now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "LEAST_BYTES", SIZE)
    monkeypatch.setattr(verdicts, "SETTLED_SECONDS", 0.0)
    return []


@pytest.fixture
def sha256(asked: list[Path]) -> Callable[[Path], str]:
    """A function that remembers."""

    def hashed(path: Path) -> str:
        asked.append(path)
        return file_sha256(path)

    return verdicts.remembering(hashed)


def test_a_file_is_hashed_once(tmp_path: Path, asked: list[Path], sha256) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))
    assert [sha256(path) for _ in range(3)] == [file_sha256(path)] * 3
    assert asked == [path]
    small = tmp_path / "b"
    small.write_bytes(bytes(SIZE - 1))
    assert sha256(small) == sha256(small) == file_sha256(small)
    assert asked == [path, small, small]


def test_a_changed_file_is_hashed_again(tmp_path: Path, asked: list[Path], sha256) -> None:
    """Whatever time of writing it was given: the kernel keeps the time of change."""
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    first = sha256(path)
    with path.open("r+b") as stream:
        stream.write(b"x")
    os.utime(path, ns=times)
    assert path.stat().st_mtime_ns == times[1]
    assert sha256(path) == file_sha256(path) != first
    assert len(asked) == 2
    assert list(verdicts.load().values()) == [file_sha256(path)], "one verdict of an inode"


def test_a_file_that_changes_while_it_is_read_is_not_remembered(tmp_path: Path, asked) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))

    def changing(path: Path) -> str:
        found = file_sha256(path)
        path.write_bytes(b"x" * SIZE)
        return found

    verdicts.remembering(changing)(path)
    assert verdicts.load() == {}


def test_a_file_that_was_just_changed_is_not_remembered(tmp_path, asked, monkeypatch) -> None:
    """Within one tick of the clock it could change again and have the same time."""
    monkeypatch.setattr(verdicts, "SETTLED_SECONDS", 60.0)
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))
    assert verdicts.remembering(file_sha256)(path) == file_sha256(path)
    assert verdicts.load() == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff"])
def test_a_damaged_memory_is_an_empty_one(tmp_path: Path, asked, sha256, content: bytes) -> None:
    """And is written again."""
    verdicts.verdicts_file().parent.mkdir(parents=True)
    verdicts.verdicts_file().write_bytes(content)
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))
    assert sha256(path) == sha256(path) == file_sha256(path)
    assert asked == [path]


def test_where_nothing_can_be_remembered_files_are_hashed(tmp_path: Path, asked, sha256) -> None:
    """A file where the folder should be, as a read-only home gives an error too."""
    (tmp_path / "cache").write_text("")
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))
    assert sha256(path) == sha256(path) == file_sha256(path)
    assert asked == [path, path]


def test_the_oldest_verdicts_go(tmp_path: Path, asked, sha256, monkeypatch) -> None:
    monkeypatch.setattr(verdicts, "MOST", 2)
    paths = [tmp_path / name for name in "abc"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number] * SIZE))
        sha256(path)
    assert list(verdicts.load().values()) == [file_sha256(path) for path in paths[1:]]
    assert not list(verdicts.verdicts_file().parent.glob(".*")), "no draft is left"
