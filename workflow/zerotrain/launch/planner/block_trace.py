"""Results of tracing a block by itself, and the metadata of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec


@dataclass(frozen=True)
class TensorMetadata:
    """Metadata of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMetadata:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return such a tensor, not a view for autograd, that keeps a whole storage alive."""
        return whole.view(self.dtype).as_strided(self.shape, self.stride, 0).data


@dataclass(frozen=True)
class SameInput:
    """Output that is one of the inputs."""

    index: int


@dataclass(frozen=True)
class BlockTrace:
    """Block that checkpointing recomputes.

    Attributes:
        outputs: Leaves of its output, with tensors as TensorMetadata or SameInput.
        spec: Tree structure of its output.
        storages: Storage of each output tensor.
        sizes: Bytes of those storages.
        saved: Bytes saved by its operations, without its inputs and outputs.
        saved_inputs: Input tensors that they save.
        saved_outputs: Output tensors that they save.
        held: Bytes alive after its forward pass, without inputs and outputs.
        casts: Bytes of its weights in autocast's type, alive until the model's forward pass ends.
        forward_peak: Peak bytes of its forward pass, with its outputs.
        recomputed_peak: The same if nothing is saved.
        backward_peak: Peak bytes of its backward pass, with the saved tensors and without the
            gradients of its outputs.
        forward_flops: Operations of its forward pass.
        backward_flops: Operations of its backward pass.
    """

    outputs: list[Any]
    spec: TreeSpec
    storages: list[int]
    sizes: list[int]
    saved: int
    saved_inputs: frozenset[int]
    saved_outputs: frozenset[int]
    held: int
    casts: int
    forward_peak: int
    recomputed_peak: int
    backward_peak: int
    forward_flops: int
    backward_flops: int


def detach_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a non-leaf tensor with the same storage that ends the graph; autocast would keep a
    leaf's casts."""
    start = tensor.detach().requires_grad_(tensor.requires_grad)
    return start.view_as(start)


def block_key(leaves: list[Any]) -> tuple[Any, ...]:
    """Return a key for the arguments of blocks: metadata, values, and shared storages."""
    first: dict[int, int] = {}
    key: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            place = first.setdefault(leaf.untyped_storage()._cdata, index)
            key.append((TensorMetadata.of(leaf), place))
        else:
            key.append(repr(leaf))
    return tuple(key)
