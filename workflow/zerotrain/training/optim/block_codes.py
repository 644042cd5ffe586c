"""Float32 tensors as 8-bit codes in blocks, and back, so that a round trip keeps every code.

A code stands for an entry of a sorted map, times its block's largest magnitude. The map of signed
numbers has 1 but not -1 (bitsandbytes: create_dynamic_map): if the largest number of a block is
negative, its code stands for slightly less, and the magnitude would be lost. So one number with
that code is decoded to its value before encoding.
"""

from __future__ import annotations

import torch

BLOCK = 256
"""Elements of a block (bitsandbytes: optim/optimizer.py, init_state)."""


def encode(values: torch.Tensor, code_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes.

    Args:
        values: float32, of any shape.
        code_map: float32 [256], sorted, with 1 as its last entry.

    Returns:
        Codes uint8 of the values' shape, and the largest magnitude of each block, float32.
    """
    largest = _blocks(values.flatten()).abs().amax(dim=1)
    share = values.flatten() / _spread(torch.where(largest > 0, largest, 1), values.numel())
    middles = (code_map[1:] + code_map[:-1]) / 2
    codes = torch.bucketize(share, middles).to(torch.uint8)
    return codes.view_as(values), largest


def decode(codes: torch.Tensor, largest: torch.Tensor, code_map: torch.Tensor) -> torch.Tensor:
    """Return what `encode` maps to these codes and magnitudes, as float32 in the codes' shape."""
    flat = codes.flatten()
    values = code_map[flat.int()] * _spread(largest, flat.numel())
    lost = _blocks(values).abs().amax(dim=1) < largest
    place = _blocks((flat == 0).float()).argmax(dim=1) + BLOCK * torch.arange(
        len(largest), device=flat.device
    )
    values[place[lost]] = -largest[lost]
    return values.view(codes.shape)


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    """Return the tensor as [blocks, BLOCK], with the last block padded with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _spread(of_blocks: torch.Tensor, count: int) -> torch.Tensor:
    return of_blocks.repeat_interleave(BLOCK)[:count]
