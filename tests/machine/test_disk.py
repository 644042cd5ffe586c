"""A folder serves for swapping if bytes reach a disk there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotrain.errors import PipelineError
from zerotrain.machine import disk


def test_a_good_folder_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was tried is gone."""
    monkeypatch.setattr(disk, "mount", lambda _: ("/dev/nvme0n1", "xfs"))
    disk.check_folder(tmp_path, "large")
    assert list(tmp_path.iterdir()) == []


def test_a_full_quota_shows_where_a_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are written and must reach the disk."""

    def full(_: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PipelineError, match="cannot be written: Disk quota exceeded"):
        disk.check_folder(tmp_path, "large")


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapping there would fill what it is to save."""
    monkeypatch.setattr(disk, "mount", lambda _: ("tmpfs", "tmpfs"))
    with pytest.raises(PipelineError, match=r"is memory, no disk \(tmpfs\)") as caught:
        disk.check_folder(tmp_path, "large")
    assert "zero3_offload" in caught.value.hint


def test_the_file_system_is_that_of_the_innermost_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/ holds everything, /fast holds more closely."""
    mounts = [
        SimpleNamespace(mountpoint="/", device="/dev/a", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path), device="/dev/b", fstype="xfs"),
    ]
    monkeypatch.setattr(disk.psutil, "disk_partitions", lambda **_: mounts)
    assert disk.mount(tmp_path / "swap") == ("/dev/b", "xfs")
    assert disk.mount(Path("/")) == ("/dev/a", "ext4")
