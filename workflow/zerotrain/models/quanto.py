"""Integer quantization of weights to 8, 4 and 2 bits, as in optimum-quanto.

Source: optimum-quanto 0.2.7 (https://github.com/huggingface/optimum-quanto), weights only. With 8
bits, a row has one scale: its largest magnitude divided by 127. With 4 and 2 bits, a group of a row
has a scale, its range divided by the number of steps, and a shift, its smallest value negated; the
group size is the largest of 128, 96, 64 and 32 that divides the row, or else the whole row.
Everything is computed in bf16, in which SimpleTuner quantizes a base, so that an adapter trains
next to the same weights as in SimpleTuner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

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
