"""NF4: the codes and values of the published formula, and of bitsandbytes where it is installed."""

from __future__ import annotations

import math

import pytest
import torch

from zerotrain.models.quantization import LEVELS, dequantize_nf4, make_tables, quantize_nf4


def rounded(value: float) -> float:
    """A float as float32 has it."""
    return float(torch.tensor(value, dtype=torch.float32))


def reference(weight: list[float]) -> tuple[list[int], list[float]]:
    """Level of each weight, and its scale before double quantization: one number at a time."""
    codes, scales = [], []
    for start in range(0, len(weight), 64):
        block = weight[start : start + 64]
        largest = max(map(abs, block))
        inverse = rounded(1 / max(largest, 1e-38))
        for value in block:
            share = min(1.0, max(-1.0, rounded(value * inverse)))
            codes.append(min(range(16), key=lambda i: (abs(LEVELS[i] - share), i)))
        scales.append(largest)
    return codes, scales


@pytest.mark.parametrize("count", [64, 5 * 64, 130, 7])
def test_each_weight_has_the_nearest_level_of_its_block(count: int) -> None:
    """Bit for bit what the formula gives, for whole blocks, a partial one, and a block of zeros."""
    torch.manual_seed(count)
    weight = torch.randn(count) * torch.rand(count)
    weight[:64] *= float(count != 5 * 64)
    packed = quantize_nf4(weight)
    codes, _ = reference(weight.tolist())
    found = torch.stack([packed.codes >> 4, packed.codes & 15], dim=1).view(-1).tolist()
    assert found[:count] == codes
    values = dequantize_nf4(packed, make_tables(weight.device), weight.shape, torch.float32)
    levels = make_tables(weight.device).scale_levels
    outer, offset = packed.outer[:-1], packed.outer[-1]
    for place in range(count):
        block = place // 64
        scale = levels[packed.scales[block].int()] * outer[block // 256] + offset
        assert values[place] == torch.tensor(LEVELS)[codes[place]] * scale


def test_scales_are_quantized_around_their_mean() -> None:
    """To the nearest of 256 levels, an error of half their largest distance at most."""
    torch.manual_seed(3)
    weight = torch.randn(300, 64) * torch.rand(300, 1)
    packed = quantize_nf4(weight)
    largest = weight.abs().amax(dim=1)
    assert packed.outer[-1] == largest.mean()
    rest = largest - largest.mean()
    assert packed.outer[:-1].tolist() == [rest[:256].abs().max(), rest[256:].abs().max()]
    levels = make_tables(weight.device).scale_levels
    assert levels.tolist() == sorted(levels.tolist())
    assert (levels[0], levels[127], levels[-1]) == (-levels[-2], 0.0, 1.0)
    step = (levels[1:] - levels[:-1]).max()
    spread = packed.outer[:-1].repeat_interleave(256)[:300]
    decoded = levels[packed.scales.int()] * spread
    assert ((decoded - rest).abs() <= spread * step * 0.51).all()


def test_a_weight_takes_four_bits_and_an_eighth() -> None:
    """4 for the code, 8 of a scale for 64 weights, 32 of an outer scale for 16,384."""
    packed = quantize_nf4(torch.randn(512, 1024))
    bits = 8 * sum(one.nbytes for one in packed) / (512 * 1024)
    assert math.isclose(bits, 4 + 8 / 64 + 32 / (64 * 256), abs_tol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    """Its CPU kernel rounds a near tie of two scales to the other one; codes are the same bits."""
    library = pytest.importorskip("bitsandbytes")
    torch.manual_seed(1)
    weight = (torch.randn(640, 1024) * 0.02).to(dtype)
    codes, state = library.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    packed = quantize_nf4(weight)
    assert torch.equal(codes.view(-1), packed.codes)
    assert torch.equal(state.state2.absmax, packed.outer[:-1])
    assert state.offset == packed.outer[-1]
    assert (state.absmax != packed.scales).float().mean() < 0.01
