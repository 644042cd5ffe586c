"""Quantization of weights: NF4 as in bitsandbytes, and integers as in optimum-quanto.

NF4 has 4-bit codes in blocks, with doubly quantized scales. Dettmers et al., "QLoRA: Efficient
Finetuning of Quantized LLMs" (2023), https://arxiv.org/abs/2305.14314. A weight is one of 16 levels
times the largest magnitude of its block of 64; these scales, less their mean, are one of 256 levels
times the largest magnitude of their block of 256 (Dettmers, "8-Bit Approximations for Parallelism
in Deep Learning" (2015), https://arxiv.org/abs/1511.04561). A weight takes 4.127 bits in total.
Codes, levels and order of operations are those of bitsandbytes' quantize_4bit with
compress_statistics, so that an adapter trains next to the same weights as with bitsandbytes.

Integers of 8, 4 and 2 bits are those of optimum-quanto 0.2.7
(https://github.com/huggingface/optimum-quanto), weights only. With 8 bits, a row has one scale: its
largest magnitude divided by 127. With 4 and 2 bits, a group of a row has a scale, its range divided
by the number of steps, and a shift, its smallest value negated; the group size is the largest of
128, 96, 64 and 32 that divides the row, or else the whole row. Everything is computed in bf16, in
which SimpleTuner quantizes a base, so that an adapter trains next to the same weights as in
SimpleTuner.
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


def quantize_nf4(weight: torch.Tensor) -> Packed:
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


def dequantize_nf4(
    packed: Packed, tables: Tables, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Compute the weights from their codes in float32, and cast them."""
    levels = tables.scale_levels[packed.scales.int()]
    rows = _blocks(levels, SCALE_BLOCK) * packed.outer[:-1, None]
    scales = rows.view(-1)[: len(levels)] + packed.outer[-1]
    values = tables.pairs[packed.codes.int()].view(-1, BLOCK) * scales[:, None]
    return values.view(-1)[: shape.numel()].view(shape).to(dtype)


def make_tables(device: torch.device) -> Tables:
    """Build the tables in which `dequantize_nf4` looks values up."""
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


GROUPS = (128, 96, 64, 32)
"""Group sizes, in order of preference."""


class Rows(NamedTuple):
    """Weights in 8 bits."""

    codes: torch.Tensor
    """int8 [out, in]."""
    scales: torch.Tensor
    """bf16 [out, 1]."""


class Groups(NamedTuple):
    """Weights in 4 or 2 bits."""

    codes: torch.Tensor
    """uint8 [weights x bits / 8]: two or four in each, the first in the lowest bits."""
    scales: torch.Tensor
    """bf16 [groups, 1]."""
    shifts: torch.Tensor
    """bf16 [groups, 1]: what is subtracted from a code times its scale."""


def quantize_rows(weight: torch.Tensor) -> Rows:
    """Round a weight [out, in] of any floating type to 8 bits."""
    rows = weight.detach().bfloat16()
    scales = rows.abs().amax(dim=1, keepdim=True) / 127
    return Rows(_rounded(rows / scales, -128, 127).to(torch.int8), scales)


def dequantize_rows(rows: Rows, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Compute the weights from their codes in bf16, and cast them."""
    return (rows.scales * rows.codes).view(shape).to(dtype)


def quantize_groups(weight: torch.Tensor, bits: int) -> Groups:
    """Round a weight [out, in] of any floating type to 4 or 2 bits."""
    length = weight.shape[1]
    fitting = (size for size in GROUPS if length % size == 0)
    groups = weight.detach().bfloat16().reshape(-1, next(fitting, length))
    smallest = groups.amin(dim=1, keepdim=True)
    steps = 2**bits - 1
    scales = (groups.amax(dim=1, keepdim=True) - smallest) / steps
    codes = _rounded((groups - smallest) / scales, 0, steps).to(torch.uint8).view(-1)
    each = 8 // bits
    bytes_ = pad(codes, (0, -codes.numel() % each)).view(-1, each)
    packed = (bytes_ << _places(bits, weight.device)).sum(dim=1, dtype=torch.uint8)
    return Groups(packed, scales, -smallest)


def dequantize_groups(
    groups: Groups, bits: int, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Compute the weights from their codes in bf16, and cast them."""
    codes: torch.Tensor = groups.codes[:, None] >> _places(bits, groups.codes.device) & 2**bits - 1
    rows = codes.view(-1)[: shape.numel()].view(len(groups.scales), -1)
    values: torch.Tensor = groups.scales * rows - groups.shifts
    return values.view(shape).to(dtype)


def _rounded(shares: torch.Tensor, lowest: int, highest: int) -> torch.Tensor:
    """Return the nearest codes; where the scale is 0, any code is right."""
    return shares.round().clamp(lowest, highest).nan_to_num(0.0)


def _places(bits: int, device: torch.device) -> torch.Tensor:
    """Return the bit offset of each code in a byte."""
    return torch.arange(0, 8, bits, device=device, dtype=torch.uint8)
