"""The files of a dataset are hashed again only where they moved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from zerotrain import artifact
from zerotrain.config.data import DataConfig
from zerotrain.data import files as module
from zerotrain.data.files import LISTING, Changes, DatasetFiles, walk

NAMES = ("a.png", "a.txt", "inner/b.png", "inner/b.txt")


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Two captioned images."""
    for name in NAMES:
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return DataConfig(images=str(tmp_path / "photos"))


def files(data: DataConfig, folder: Path) -> DatasetFiles:
    """The files as they are now."""
    return DatasetFiles(data, folder, walk(data))


@pytest.fixture
def recorded(data: DataConfig, tmp_path: Path) -> Path:
    """The folder of a dataset that was prepared from them."""
    folder = tmp_path / "dataset"
    files(data, folder).record({})
    artifact.publish_manifest(folder, "dataset", {})
    return folder


def updated(data: DataConfig, folder: Path) -> str:
    """The digest after a plan."""
    return files(data, folder).update()


def replace(path: Path, text: str) -> None:
    """Other content of the same size at the same time, as rsync may write it."""
    before = path.stat()
    new = path.with_name("new")
    new.write_text(text)
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)


EDITS: dict[str, tuple[Any, Changes]] = {
    "content": (lambda f: (f / "a.txt").write_text("other"), Changes(changed=["a.txt"])),
    "content of size and time": (
        lambda f: replace(f / "inner/b.txt", "inner/c.txt"),
        Changes(changed=["inner/b.txt"]),
    ),
    "a new one": (lambda f: (f / "c.png").write_text("c"), Changes(new=["c.png"])),
    "one less": (lambda f: (f / "a.png").unlink(), Changes(removed=["a.png"])),
    "a new name": (
        lambda f: (f / "a.png").rename(f / "z.png"),
        Changes(new=["z.png"], removed=["a.png"]),
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_the_digest_and_its_reversal_gives_it_back(
    data: DataConfig, recorded: Path, edit: str
) -> None:
    """The files are named; without a listing the digest is the same as with one."""
    act, expected = EDITS[edit]
    photos = Path(str(data.images))
    before, kept = updated(data, recorded), {name: (photos / name).read_text() for name in NAMES}
    act(photos)
    found = files(data, recorded).find_changes()
    assert found
    relative = [
        [os.path.relpath(path, photos) for path in paths]
        for paths in (found.changed, found.new, found.removed)
    ]
    assert relative == [expected.changed, expected.new, expected.removed]
    assert updated(data, recorded) != before
    for path in photos.rglob("*.*"):
        path.unlink()
    for name, text in kept.items():
        (photos / name).write_text(text)
    assert updated(data, recorded) == before
    (recorded / ".files" / LISTING).unlink()
    assert updated(data, recorded) == before


def test_an_unchanged_dataset_is_not_read(
    data: DataConfig, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of touched files each is hashed once."""
    hashed: list[str] = []
    monkeypatch.setattr(module, "file_sha256", lambda path: hashed.append(path.name) or "0" * 64)
    before = updated(data, recorded)
    assert hashed == []
    assert files(data, recorded).are_unchanged()
    monkeypatch.undo()
    (Path(str(data.images)) / "a.png").touch()
    assert not files(data, recorded).are_unchanged()
    assert updated(data, recorded) == before
    assert files(data, recorded).are_unchanged()


def test_a_new_dataset_is_planned_without_reading_it(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare_dataset reads everything anyway, and so do images that were added."""
    monkeypatch.setattr(module, "file_sha256", lambda path: pytest.fail(f"{path} is read"))
    folder = tmp_path / "dataset"
    first = updated(data, folder)
    assert updated(data, folder) == first
    (Path(str(data.images)) / "a.png").touch()
    assert updated(data, folder) != first


def test_a_file_edited_during_preparation_is_found_by_the_next_plan(
    data: DataConfig, tmp_path: Path
) -> None:
    """What was read may be neither the former nor the present content."""
    folder, photos = tmp_path / "dataset", Path(str(data.images))
    reading = files(data, folder)
    (photos / "a.txt").write_text("edited meanwhile")
    recorded = reading.record({})
    assert files(data, folder).find_changes() == Changes(changed=[str(photos / "a.txt")])
    assert updated(data, folder) != recorded


def test_a_pipe_is_never_opened(data: DataConfig, recorded: Path) -> None:
    """Reading one would wait forever."""
    os.mkfifo(Path(str(data.images)) / "pipe.png")
    before = updated(data, recorded)
    (recorded / ".files" / LISTING).unlink()
    assert updated(data, recorded) == before
