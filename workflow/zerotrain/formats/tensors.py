"""Tensors on their way from one file to another: named, read when their turn comes, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zerotrain.errors import PipelineError
from zerotrain.tensor_file import open_tensors, same_bits, write_tensor_file


@dataclass(frozen=True)
class Stored:
    """A tensor that is not held: its type, its shape, and how it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def written_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type it has in a file of this type; counters, indices and scalars keep theirs."""
        return dtype if self.dtype.is_floating_point and self.shape else self.dtype


def tensors_in(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of safetensors files by name; pages come when one is read."""
    found = {}
    for name, file in open_tensors(files).items():
        tensor = file.get_slice(name)
        dtype = tensor[:0].dtype if tensor.get_shape() else file.get_tensor(name).dtype
        found[name] = Stored(dtype, tuple(tensor.get_shape()), partial(file.get_tensor, name))
    return found


def write_tensors(
    path: Path,
    tensors: Mapping[str, Stored],
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> str:
    """Write one safetensors file, sorted by name, one tensor in memory at a time.

    Returns:
        The file's sha256.

    Raises:
        PipelineError: a value does not fit into the type.
    """
    layout = {n: (tensors[n].written_as(dtype), tensors[n].shape) for n in sorted(tensors)}
    return write_tensor_file(
        path, layout, lambda name: fitting(name, tensors[name].read(), layout[name][0]), metadata
    )


def fitting(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor, whose values are finite in this type.

    Raises:
        PipelineError: naming it and the number of those that are not.
    """
    # Rounding keeps the order, and a NaN anywhere is both ends.
    if tensor.is_floating_point() and tensor.numel():
        ends = torch.stack(tensor.aminmax()).to(dtype)
        if not bool(ends.isfinite().all()):
            count = int((~tensor.to(dtype).isfinite()).sum())
            raise PipelineError(
                f"{name}: {count} values are not finite in {dtype}",
                hint="choose --dtype fp32 or bf16",
            )
    return tensor


def hold_to(
    expected: Mapping[str, Stored],
    loaded: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    where: Path,
) -> None:
    """Hold what a library loaded to what was to be written: names, and values bit by bit.

    Of a narrower type the library may hold the same values in a wider one.

    Raises:
        PipelineError: naming the first tensor that differs.
    """
    for name in sorted(expected.keys() | loaded.keys()):
        if name not in loaded or name not in expected:
            found = "absent in" if name not in loaded else "surplus in"
            raise otherwise(f"{name} is {found} what the library loads", where)
        source = expected[name]
        written = source.read().to(source.written_as(dtype))
        if loaded[name].is_meta or not same_bits(written.to(loaded[name].dtype), loaded[name]):
            raise otherwise(f"{name} reads back otherwise than it was written", where)


def otherwise(what: str, where: Path) -> PipelineError:
    """The error of a file that the library loads otherwise than it was meant."""
    return PipelineError(
        f"{where}: {what}", hint="look at the disk and its room; nothing was published"
    )
