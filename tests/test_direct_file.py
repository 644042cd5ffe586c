"""What is appended is in the file, in order and once, whatever the file system takes."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from zerotrain.artifact import direct_io as direct_file
from zerotrain.artifact import file_sha256
from zerotrain.artifact.direct_io import DirectWriter

BLOCK = 2 * direct_file.ALIGNED_BYTES


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """Blocks that a small file fills several of."""
    monkeypatch.setattr(direct_file, "BLOCK_BYTES", BLOCK)


def write(path: Path, tensors: list[torch.Tensor]) -> str:
    """Append them all; the file's sha256."""
    with DirectWriter(path) as file:
        for tensor in tensors:
            file.append(tensor, tensor.dtype)
    return file.sha256


@pytest.fixture(params=["a disk", "memory"])
def folder(request, tmp_path: Path, tmp_path_factory):
    """A folder on a disk, and one of a file system in memory."""
    if request.param == "a disk":
        yield tmp_path
        return
    place = Path("/dev/shm") / f"{tmp_path.name}-{os.getpid()}"
    place.mkdir()
    yield place
    for path in place.iterdir():
        path.unlink()
    place.rmdir()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK, 7 * BLOCK + 4097])
def test_every_size_is_written(folder: Path, size: int) -> None:
    """Below, at and above whole blocks, in one piece and in pieces of all lengths."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    pieces = list(data.split(max(1, size // 9)))
    for name, tensors in (("one", [data]), ("pieces", pieces)):
        known = write(folder / name, tensors)
        assert (folder / name).read_bytes() == data.numpy().tobytes()
        assert known == file_sha256(folder / name)


def test_a_longer_file_is_replaced(folder: Path) -> None:
    """Nothing of it is left behind the new end."""
    write(folder / "f", [torch.ones(5 * BLOCK, dtype=torch.uint8)])
    write(folder / "f", [torch.zeros(3, dtype=torch.uint8)])
    assert (folder / "f").read_bytes() == bytes(3)


def test_elements_are_converted(tmp_path: Path) -> None:
    """Across blocks, with the values that `.to` gives; and the tensor is free again at once."""
    source = torch.randn(3 * BLOCK)
    expected = source.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with DirectWriter(tmp_path / "f") as file:
        for part in source.split(999):
            file.append(part, torch.bfloat16)
            part.fill_(7)
    assert (tmp_path / "f").read_bytes() == expected


def test_a_disk_of_larger_blocks_is_written_the_ordinary_way(tmp_path: Path, monkeypatch) -> None:
    """As a disk refuses what is not aligned to its own blocks: all of it is written still."""
    monkeypatch.setattr(direct_file, "ALIGNED_BYTES", 8)
    monkeypatch.setattr(direct_file, "BLOCK_BYTES", 1000)
    data = torch.randint(0, 256, (12345,), dtype=torch.uint8)
    write(tmp_path / "f", [data])
    assert (tmp_path / "f").read_bytes() == data.numpy().tobytes()


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    """By the thread that writes, to the one that appends."""
    before = (
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK, before[1][1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "f", [torch.ones(9 * BLOCK, dtype=torch.uint8)])
    finally:
        signal.signal(signal.SIGXFSZ, before[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])


def test_what_started_and_failed_is_released(tmp_path: Path) -> None:
    """The reason is passed on, and no file stays open."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="no more"), DirectWriter(tmp_path / "f") as file:
        raise ValueError("no more")
    assert file.sha256 == ""
    assert len(os.listdir("/proc/self/fd")) == before
