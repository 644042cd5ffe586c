"""Every byte of a torch.save file that is read is compared with its checksum."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external import pickles


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with two tensors."""
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(300.0), "b": torch.ones(7, dtype=torch.bfloat16)}, path)
    return path


def test_a_flipped_bit_in_any_record_is_refused(saved: Path) -> None:
    """One bit in the middle of each record in turn; the file of before is read again."""
    sound = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        records = [info for info in archive.infolist() if info.file_size]
    assert len(records) >= 5
    for info in records:
        with saved.open("rb") as stream:
            stream.seek(info.header_offset)
            header = stream.read(30)
        start = info.header_offset + 30 + sum(header[26:30:2]) + 256 * sum(header[27:30:2])
        data = bytearray(sound)
        data[start + info.file_size // 2] ^= 4
        saved.write_bytes(data)
        with pytest.raises(PipelineError, match=r"file.pt: damaged"):
            pickles.load(saved)
        saved.write_bytes(sound)
        assert torch.equal(pickles.load(saved)["a"], torch.arange(300.0))


def test_any_flipped_byte_is_refused_or_harmless(saved: Path) -> None:
    """Headers, padding and directory too: what is read is what was saved, or nothing is read."""
    sound, expected = saved.read_bytes(), pickles.load(saved)
    refused = 0
    for place in range(0, len(sound), 29):
        data = bytearray(sound)
        data[place] ^= 0x10
        saved.write_bytes(data)
        try:
            found = pickles.load(saved)
        except PipelineError as error:
            refused += str(saved) in error.what
            continue
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), place
    assert refused > 20


def test_a_file_without_checksums_is_read_and_known(saved: Path) -> None:
    """torch can be set to write none; such a file is not damaged, but nothing vouches for it."""
    assert pickles.has_checksums(saved)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(300.0)}, saved)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(pickles.load(saved)["a"], torch.arange(300.0))
    assert not pickles.has_checksums(saved)
