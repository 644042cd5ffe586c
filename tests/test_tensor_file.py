"""Files are those that the safetensors library writes, made in the memory of one chunk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zerotrain.artifact import direct_io as direct_file
from zerotrain.artifact import file_sha256, tensor_file
from zerotrain.artifact.tensor_file import (
    OpenTensorFile,
    open_tensors,
    same_bits,
    write_tensor_file,
)
from zerotrain.errors import PipelineError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {"a": (3, 5), "b": (0,), "c.d": (), "z": (7,), "ü": (2, 0, 3)}


def values(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random tensors, an empty and a scalar one among them."""
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def layout(tensors: dict[str, torch.Tensor]) -> tensor_file.Layout:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def header(path: Path) -> tuple[int, dict[str, object]]:
    """Length of the header, and the header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return length, json.loads(data[8 : 8 + length])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_file_is_the_librarys_byte_for_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    """Where names come in the library's order, that of the alphabet."""
    tensors = values(dtype)
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    known = write_tensor_file(tmp_path / "ours", layout(tensors), tensors.__getitem__)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()
    assert known == file_sha256(tmp_path / "ours")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", [4, 12, 8 * 1024**2])
def test_tensors_are_converted_on_their_way(
    tmp_path: Path, monkeypatch, dtype: torch.dtype, block: int
) -> None:
    """Block by block, with the values that `.to` gives; both of the library's readers agree."""
    monkeypatch.setattr(direct_file, "BLOCK_BYTES", block)
    tensors = values()
    wanted = {name: (dtype, shape) for name, shape in SHAPES.items()}
    known = write_tensor_file(tmp_path / "f", wanted, tensors.__getitem__)
    assert known == file_sha256(tmp_path / "f")
    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == tensors.keys()
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert loaded[name].dtype == dtype
            assert torch.equal(loaded[name], tensor.to(dtype))
            assert torch.equal(file.get_tensor(name), tensor.to(dtype))


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    """The header ends at a multiple of 8 bytes, and wide types stand before narrow ones."""
    tensors = {
        "half": torch.ones(3, dtype=torch.float16),
        "flag": torch.tensor([True, False, True]),
        "whole": torch.arange(3),
        "single": torch.ones(3),
    }
    write_tensor_file(tmp_path / "f", layout(tensors), tensors.__getitem__)
    length, entries = header(tmp_path / "f")
    assert length % 8 == 0
    assert list(entries) == ["__metadata__", "whole", "single", "half", "flag"]
    loaded = load_file(tmp_path / "f")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_strided_tensors_lie_row_by_row(tmp_path: Path) -> None:
    """A transposed view is written as what it shows."""
    tensor = torch.arange(12.0).reshape(3, 4).T
    write_tensor_file(tmp_path / "f", {"t": (torch.float32, [4, 3])}, lambda name: tensor)
    assert torch.equal(load_file(tmp_path / "f")["t"], tensor)


def test_a_tensor_of_another_shape_is_not_written(tmp_path: Path) -> None:
    """The header stands already: it must not lie."""
    wanted = {"t": (torch.float32, [4, 3])}
    with pytest.raises(ValueError, match=r"t: shape \[3, 4\], expected \[4, 3\]"):
        write_tensor_file(tmp_path / "f", wanted, lambda name: torch.ones(3, 4))


def test_tensors_may_come_unannounced(tmp_path: Path) -> None:
    """Each is in the file before the next one comes, and the header is whole at the end."""
    file = OpenTensorFile(tmp_path / "f")
    buffer = torch.empty(5)
    for number in range(4):
        buffer.fill_(number)
        assert file.takes(str(number), buffer)
        file.write(str(number), buffer)
    file.write("none", torch.ones(0))
    assert file.size == 80
    assert file.close() == ["0", "1", "2", "3", "none"]
    loaded = load_file(tmp_path / "f")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        **{str(number): [number] * 5 for number in range(4)},
        "none": [],
    }


def test_a_full_header_takes_no_more(tmp_path: Path, monkeypatch) -> None:
    """The names that it took are all there; a first tensor is always taken."""
    monkeypatch.setattr(tensor_file, "HEADER_ROOM", 1024)
    file = OpenTensorFile(tmp_path / "f")
    tensor = torch.ones(1)
    assert file.takes("x" * 2000, tensor)
    taken = 0
    while file.takes(f"name-{taken}", tensor):
        file.write(f"name-{taken}", tensor)
        taken += 1
    file.close()
    assert taken > 5
    assert header(tmp_path / "f")[0] == 1024
    assert len(load_file(tmp_path / "f")) == taken


def test_bits_are_compared(monkeypatch) -> None:
    """Zeros of two signs differ; so does one bit in the last chunk, and a shape."""
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 8)
    a = torch.arange(5.0)
    assert same_bits(a, a.clone())
    assert same_bits((a + 1).to(torch.bfloat16), a + 1.0001)
    assert not same_bits(a, a.reshape(5, 1))
    for at, value in ((0, -0.0), (4, 4.0000005)):
        b = a.clone()
        b[at] = value
        assert not same_bits(a, b)
    assert same_bits(torch.ones(0), torch.ones(0))


def test_tensors_of_several_files_are_opened_by_name(tmp_path: Path) -> None:
    """Whichever file holds them."""
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, tmp_path / name)
    opened = open_tensors([tmp_path / "a", tmp_path / "b"])
    assert {name: file.get_tensor(name).tolist() for name, file in opened.items()} == {
        "a": [1, 1],
        "b": [1, 1],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_part_of_a_tensor_is_read_alone(tmp_path: Path, monkeypatch, dtype) -> None:
    """Into a tensor of any type, in blocks where it is converted; a file that is cut off after its
    header was read is refused in a sentence."""
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)
    whole = torch.randn(5, 40)
    path = tmp_path / "a.safetensors"
    tensors = {"b": torch.ones(3, dtype=torch.int8), "a": whole}
    layout = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    write_tensor_file(path, layout, tensors.__getitem__)
    parts = tensor_file.TensorParts()
    assert set(parts.names(path)) == {"a", "b"}
    for start, length in ((0, 200), (7, 100), (199, 1), (50, 0)):
        into = torch.zeros(length, dtype=dtype)
        parts.fill(path, "a", start, into)
        assert torch.equal(into, whole.flatten()[start : start + length].to(dtype))
    with pytest.raises(ValueError, match="has no 2 elements from 199"):
        parts.fill(path, "a", 199, torch.zeros(2))
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(PipelineError, match=r"a.safetensors: ends early"):
        parts.fill(path, "a", 0, torch.zeros(200))
