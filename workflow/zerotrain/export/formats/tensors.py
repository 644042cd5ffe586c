"""Tensors that are copied from one file to another: read lazily, renamed, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from zerotrain.artifact.tensor_file import open_tensors, same_bits, write_tensor_file
from zerotrain.errors import PipelineError
from zerotrain.machine.memory_errors import find_out_of_memory
from zerotrain.models.pretrained import DamagedModelError

DISK = "look at the disk and its room; nothing was published"


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not in memory: its type, its shape, and a function that reads it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def written_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return its type in a file of type `dtype`; counters, indices and scalars keep theirs."""
        return dtype if self.dtype.is_floating_point and self.shape else self.dtype


def tensors_in(files: Iterable[Path]) -> dict[str, LazyTensor]:
    """Return the tensors of safetensors files by name; they are read when used."""
    tensors = {}
    for name, file in open_tensors(files).items():
        tensor = file.get_slice(name)
        dtype = tensor[:0].dtype if tensor.get_shape() else file.get_tensor(name).dtype
        tensors[name] = LazyTensor(dtype, tuple(tensor.get_shape()), partial(file.get_tensor, name))
    return tensors


def write_tensors(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> str:
    """Write one safetensors file, sorted by name, with one tensor in memory at a time.

    Returns:
        The file's sha256.

    Raises:
        PipelineError: a value does not fit into the type.
    """
    layout = {n: (tensors[n].written_as(dtype), tensors[n].shape) for n in sorted(tensors)}
    return write_tensor_file(
        path,
        layout,
        lambda name: check_finite(name, tensors[name].read(), layout[name][0]),
        metadata,
    )


def check_finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor, after checking that its values are finite in this type.

    Raises:
        PipelineError: some are not; the tensor and their number are named.
    """
    # Rounding keeps the order, and both ends are NaN if any value is.
    if tensor.is_floating_point() and tensor.numel():
        ends = torch.stack(tensor.aminmax()).to(dtype)
        if not bool(ends.isfinite().all()):
            count = int((~tensor.to(dtype).isfinite()).sum())
            raise PipelineError(
                f"{name}: {count} values are not finite in {dtype}",
                hint="choose --dtype fp32 or bf16",
            )
    return tensor


def verify_tensors(
    expected: Mapping[str, LazyTensor],
    loaded: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    where: Path,
) -> None:
    """Compare the tensors that a library loaded with the expected ones: names, and values by bits.

    The library may hold the values of a narrow type in a wider one.

    Raises:
        PipelineError: a tensor differs; the first is named.
    """
    for name in sorted(expected.keys() | loaded.keys()):
        if name not in loaded or name not in expected:
            difference = "absent in" if name not in loaded else "surplus in"
            raise mismatch(f"{name} is {difference} what the library loads", where)
        source = expected[name]
        written = source.read().to(source.written_as(dtype))
        if loaded[name].is_meta or not same_bits(written.to(loaded[name].dtype), loaded[name]):
            raise mismatch(f"{name} reads back with other values than were written", where)


def mismatch(what: str, where: Path) -> PipelineError:
    """Return the error for a file that the library loads with other contents."""
    return PipelineError(f"{where}: {what}", hint=DISK)


@contextmanager
def report_load_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of a library that loads a written folder into a PipelineError."""
    try:
        yield
    except DamagedModelError as error:
        raise PipelineError(f"{folder}: does not load again: {error.what}", hint=DISK) from error
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        if find_out_of_memory(error):
            raise
        raise PipelineError(f"{folder}: does not load again: {error}", hint=DISK) from error


def fold_alphas(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Multiply each layer's first factor of a LoRA by its own alpha / rank, and drop the alphas.

    diffusers looks for alphas of some layers under other names, or for none: layers of several
    alphas would get one of them, or the scale 1.

    Args:
        tensors: Those of a file, by names of kohya, diffusers or peft.

    Returns:
        The factors that need no alpha, in float32 where they changed.
    """
    folded = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    for name in tensors.keys() - folded.keys():
        layer = name.removesuffix(".alpha")
        for first in (f"{layer}.lora_down.weight", f"{layer}.lora_A.weight"):
            if first in folded:
                down = folded[first]
                folded[first] = down.float() * (tensors[name].item() / len(down))
    return folded
