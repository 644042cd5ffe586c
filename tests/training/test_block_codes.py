"""Codes of 8 bits in blocks: a round trip through float32 keeps every code and magnitude."""

from __future__ import annotations

import pytest
import torch

from zerotrain.training.optim.block_codes import BLOCK, decode, encode


def code_map(signed: bool) -> torch.Tensor:
    """As bitsandbytes has it: dense at zero, with 1, and without -1 where it is signed."""
    powers = torch.logspace(-6, 0, 127 if signed else 255)
    if signed:
        return torch.cat([-0.993 * powers.flip(0), torch.zeros(1), powers, torch.ones(1)]).unique()
    return torch.cat([torch.zeros(1), powers]).unique()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [(3, 7), (BLOCK,), (5, 103), (4 * BLOCK + 1,)])
def test_a_round_trip_keeps_the_codes(signed, size):
    """For blocks whose largest number is positive, negative, or all zero, and a part of a block."""
    torch.manual_seed(2)
    found, values = code_map(signed), torch.randn(size) * torch.rand(size) ** 8 * 1e-5
    values = values if signed else values.square()
    values.view(-1)[-300:-200] = 0
    codes, largest = encode(values, found)
    once = decode(codes, largest, found)
    again, same = encode(once, found)
    assert torch.equal(again, codes)
    assert torch.equal(same, largest)
    assert torch.equal(decode(again, same, found), once)
    assert len(codes.unique()) > 5


def test_the_values_are_the_nearest_of_the_map():
    """An error of half a step of the map at most, times the magnitude of the block."""
    torch.manual_seed(3)
    found, values = code_map(signed=True), torch.randn(700)
    codes, largest = encode(values, found)
    steps = found.diff()
    below, above = (codes.int() - 1).clamp(min=0), codes.int().clamp(max=len(steps) - 1)
    bound = torch.maximum(steps[below], steps[above])
    error = (decode(codes, largest, found) - values).abs()
    assert (error <= bound / 2 * largest.repeat_interleave(BLOCK)[:700] * 1.0001).all()
    assert error.max() > 0


def test_a_negative_largest_number_comes_back_as_it_was():
    """The map has no -1: the number would come back smaller, and with it the whole block."""
    values = torch.zeros(300)
    values[5], values[6], values[299] = -3.0, 2.0, 0.5
    codes, largest = encode(values, code_map(signed=True))
    assert largest.tolist() == [3.0, 0.5]
    assert decode(codes, largest, code_map(signed=True))[5] == -3.0
