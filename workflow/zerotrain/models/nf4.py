"""NF4 quantization: 4-bit codes in blocks, with doubly quantized scales.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023),
https://arxiv.org/abs/2305.14314. A weight is one of 16 levels times the largest magnitude of its
block of 64; these scales, less their mean, are one of 256 levels times the largest magnitude of
their block of 256 (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2015),
https://arxiv.org/abs/1511.04561). A weight takes 4.127 bits in total. Codes, levels and order of
operations are those of bitsandbytes' quantize_4bit with compress_statistics, so that an adapter
trains next to the same weights as with bitsandbytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

BLOCK, SCALE_BLOCK = 64, 256
"""Weights that share a scale, and scales that share an outer scale."""
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, appendix E)."""
SMALLEST = 1e-38
"""Lower bound of a scale used as a divisor: a block of zeros stays zeros."""


class Packed(NamedTuple):
    """Quantized weights."""

    codes: torch.Tensor
    """uint8 [blocks x 32], two weights in each, the first in the upper half."""
    scales: torch.Tensor
    """uint8 [blocks]."""
    outer: torch.Tensor
    """float32 [blocks / 256 + 1]: the outer scales, then the mean of the scales."""


class Tables(NamedTuple):
    """The values of codes, on the device of the codes."""

    pairs: torch.Tensor
    """float32 [256, 2]: the two levels of each byte."""
    scale_levels: torch.Tensor
    """float32 [256]."""


def quantize(weight: torch.Tensor) -> Packed:
    """Round a weight of any shape and floating type to NF4; the last block may be partial."""
    blocks = _blocks(weight.detach().flatten().float(), BLOCK)
    codes, largest = _nearest(blocks, torch.tensor(LEVELS, device=weight.device))
    codes = codes.view(-1)
    offset = largest.mean()
    scales, outer = _nearest(_blocks(largest - offset, SCALE_BLOCK), _scale_levels(weight.device))
    return Packed(
        codes[::2] << 4 | codes[1::2],
        scales.view(-1)[: len(largest)].clone(),
        torch.cat([outer, offset.view(1)]),
    )


def dequantize(
    packed: Packed, tables: Tables, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Compute the weights from their codes in float32, and cast them."""
    levels = tables.scale_levels[packed.scales.int()]
    rows = _blocks(levels, SCALE_BLOCK) * packed.outer[:-1, None]
    scales = rows.view(-1)[: len(levels)] + packed.outer[-1]
    values = tables.pairs[packed.codes.int()].view(-1, BLOCK) * scales[:, None]
    return values.view(-1)[: shape.numel()].view(shape).to(dtype)


def make_tables(device: torch.device) -> Tables:
    """Build the tables in which `dequantize` looks values up."""
    levels = torch.tensor(LEVELS, device=device)
    byte = torch.arange(256, device=device)
    return Tables(torch.stack([levels[byte >> 4], levels[byte & 15]], dim=1), _scale_levels(device))


def _nearest(blocks: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest levels' indices, uint8 of the blocks' shape, and each block's maximum."""
    largest = blocks.abs().amax(dim=1)
    share = (blocks * (1.0 / largest.clamp(min=SMALLEST)).unsqueeze(1)).clamp(-1, 1)
    middles = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize(share, middles, out_int32=True).to(torch.uint8), largest


def _scale_levels(device: torch.device) -> torch.Tensor:
    """Build the dynamic 8-bit data type: 7 decades with 1 to 64 levels of either sign, 0 and 1.

    It is computed on CPU, so that every device has the same bits.
    """
    decades = []
    with torch.device("cpu"):  # whatever device the caller makes its tensors on
        for place in range(7):
            edges = torch.linspace(0.1, 1, 2**place + 1)
            decades.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (place - 6))
        positive = torch.cat(decades)
        levels = torch.cat([positive, -positive, torch.tensor([0.0, 1.0])]).sort().values
    return levels.to(device)


def _blocks(flat: torch.Tensor, size: int) -> torch.Tensor:
    """Reshape to [blocks, size], the last block padded with zeros."""
    return pad(flat, (0, -flat.numel() % size)).view(-1, size)
