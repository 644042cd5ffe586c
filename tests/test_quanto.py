"""Integer weights: the values of the formula, one at a time, and of optimum-quanto itself."""

from __future__ import annotations

import pytest
import torch

from zerotrain.models.quantization import (
    dequantize_groups,
    dequantize_rows,
    quantize_groups,
    quantize_rows,
)

SHAPES = [(6, 7), (5, 128), (4, 256), (3, 192), (3, 160), (2, 130), (4, 416)]
GROUP = {7: 7, 128: 128, 256: 128, 192: 96, 160: 32, 130: 130, 416: 32}
"""Weights that share a scale, by the length of a row: 160 and 416 are no multiples of 64 or 96."""
BF16 = torch.bfloat16


def weight_of(shape: tuple[int, int], dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random rows of different sizes, one of zeros."""
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape) * 0.02 * torch.rand(shape[0], 1)
    weight[1] = 0.0
    return weight.to(dtype)


def restored(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantized and dequantized again, in bf16."""
    if bits == 8:
        return dequantize_rows(quantize_rows(weight), weight.shape, BF16)
    return dequantize_groups(quantize_groups(weight, bits), bits, weight.shape, BF16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_each_weight_is_a_code_times_the_scale_of_its_group(
    bits: int, shape: tuple[int, int]
) -> None:
    """Bit for bit, each operation rounded to bf16."""
    weight = weight_of(shape)
    size = shape[1] if bits == 8 else GROUP[shape[1]]
    expected = []
    for group in weight.reshape(-1, size):
        if bits == 8:
            scale, shift, lowest = group.abs().max() / 127, torch.tensor(0.0, dtype=BF16), -128
        else:
            scale, shift, lowest = (group.max() - group.min()) / (2**bits - 1), -group.min(), 0
        for value in group:
            share = float((value + shift) / scale) if scale else 0.0
            code = min(lowest + 2**bits - 1, max(lowest, round(share)))
            expected.append(scale * code - shift)
    assert torch.equal(restored(weight, bits), torch.stack(expected).view(shape))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_take_their_bits(bits: int) -> None:
    """And a scale of 16 bits a row, or with the shift 32 bits for 128 weights."""
    packed = quantize_rows(weight_of((64, 256))) if bits == 8 else None
    sizes = packed or quantize_groups(weight_of((64, 256)), bits)
    found = 8 * sum(one.nbytes for one in sizes) / (64 * 256)
    assert found == (8 + 16 / 256 if bits == 8 else bits + 32 / 128)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_weights_are_those_of_quanto(bits: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of its linear layer in bf16; its kernels for 4 bits on a GPU may round once more."""
    library = pytest.importorskip("optimum.quanto", minversion="0.2.7")
    weight = weight_of(shape, dtype)
    plain = torch.nn.Linear(*reversed(shape), dtype=BF16)
    kind = getattr(library, f"qint{bits}")
    layer = library.QLinear.from_module(plain, weights=kind)
    own = weight.to(BF16)
    if bits == 8:
        scale, shift = layer.optimizer(own, qtype=kind, axis=0), None
    else:
        scale, shift = layer.optimizer(own, qtype=kind, axis=0, group_size=layer.weight_group_size)
    theirs = library.quantize_weight(
        own, kind, 0, scale, shift, layer.weight_group_size, optimized=False
    )
    assert torch.equal(restored(weight, bits), theirs.dequantize())
