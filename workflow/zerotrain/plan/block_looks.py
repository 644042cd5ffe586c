"""What is known of a block that was traced by itself, and the looks of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec


@dataclass(frozen=True)
class Look:
    """The look of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Look:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Such a tensor, no view to autograd, that keeps a whole storage alive."""
        return whole.view(self.dtype).as_strided(self.shape, self.stride, 0).data


@dataclass(frozen=True)
class SameInput:
    """An output that is one of the inputs."""

    index: int


@dataclass(frozen=True)
class Block:
    """A block that checkpointing recomputes.

    Attributes:
        outputs: The leaves of its output, tensors as Look or SameInput.
        spec: How the leaves make its output.
        storages: Which storage each output tensor lies in.
        sizes: Bytes of those storages.
        saved: Bytes that its operations save, without its inputs and outputs.
        saved_inputs: Which of its input tensors they save.
        saved_outputs: Which of its output tensors they save.
        held: Bytes alive after its forward pass, without inputs and outputs.
        casts: Bytes of its weights in autocast's type, alive until the model's forward pass ends.
        forward_peak: Most bytes alive in its forward pass, with its outputs.
        recomputed_peak: The same where nothing is saved.
        backward_peak: The same in its backward pass, with what is saved and without the gradients
            of its outputs.
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


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's storage as the end of its graph; no leaf, whose casts autocast would keep."""
    start = tensor.detach().requires_grad_(tensor.requires_grad)
    return start.view_as(start)


def looks_of(leaves: list[Any]) -> tuple[Any, ...]:
    """What tells the arguments of blocks apart: looks, values, and which share a storage."""
    first: dict[int, int] = {}
    found: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            place = first.setdefault(leaf.untyped_storage()._cdata, index)
            found.append((Look.of(leaf), place))
        else:
            found.append(repr(leaf))
    return tuple(found)
