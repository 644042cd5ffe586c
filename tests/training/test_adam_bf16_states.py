"""Moments in bf16 under offload: rounded without bias, resumed to the bit, switched both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.matrix import deviation

from zerotrain.training.optim.adam_bf16_states import MOMENTS, AdamBf16States, Dither

STATES = {"bf16_optimizer_states": True}
MIDDLE, END = 4, 8


def test_rounding_keeps_the_mean() -> None:
    """Each value becomes one of its two neighbours, the nearer one more often; what bf16 has stays.
    The mean of 2^16 roundings is within four standard deviations of the value."""
    dither, count = Dither(2**16), 2**16
    for value in (1.0 + 2**-9, -3.01, 1e-12, 0.25):
        low = torch.tensor(value).view(torch.int32).bitwise_and(-0x10000).view(torch.float32)
        gap = abs(float(low)) * 2**-7
        for step in (1, 2, 1000):
            values = dither.round(torch.full((count,), value), step, 0).float()
            assert (values - value).abs().max() < gap
            assert float(values.double().mean()) == pytest.approx(value, abs=4 * gap / 2 / 256)
    assert torch.equal(values, torch.full((count,), 0.25))


def test_steps_round_differently() -> None:
    """Places of one step, pieces and steps: none follows another."""
    dither = Dither(4096)

    def rounded(step: int, piece: int) -> torch.Tensor:
        values = dither.round(torch.full((4096,), 1 + 2**-8), step, piece).float()  # half way
        return (values > 1.002).double() - 0.5

    draws = [rounded(1, 0), rounded(1, 1), rounded(2, 0), rounded(1, 0).roll(1)]
    for number, one in enumerate(draws):
        for other in draws[:number]:
            assert abs(float((one * other).mean()) * 4) < 4 / 64  # four deviations of 1/sqrt(4096)


@pytest.mark.slow
def test_a_second_moment_falls_as_float32s_does() -> None:
    """With a beta2 of 0.999 and no gradient; the nearest value would leave it as it is."""
    parameter = torch.nn.Parameter(torch.zeros(4096))
    parameter.grad = torch.ones(4096)
    optimizer = AdamBf16States([parameter], lr=0.0, betas=(0.9, 0.999))
    optimizer.step()
    parameter.grad.zero_()
    for _ in range(500):
        optimizer.step()
    state = optimizer.state[parameter]
    assert {state[slot].dtype for slot in MOMENTS} == {torch.bfloat16}
    expected = 1e-3 * 0.999**500
    assert float(state["exp_avg_sq"].float().mean()) == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_a_switch_to_bf16_states_and_back_loses_their_rounding_alone(training):
    """From float32 and back again: bf16 moments are float32 values, so that nothing else is lost,
    and a resume in the middle gives the same bits."""
    preset = "zero2_offload"
    plain = training.run("plain", preset, END, save_every=MIDDLE, keep=9)
    start: dict[str, Any] = {"state": training.export_state("plain", MIDDLE)}
    losses = training.run("bf16", preset, END, save_every=MIDDLE, keep=9, **STATES, **start)
    assert 0 < deviation(losses, plain) < 1e-3
    saved = training.checkpoint("bf16", END)
    moments = {f"{n}/{s}": saved.tensor(n, s) for n in saved.names for s in MOMENTS}
    assert all(tensor.dtype == torch.float32 for tensor in moments.values())
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in moments.values())

    training.run("parts", preset, MIDDLE + 2, save_every=MIDDLE, **STATES, **start)
    assert training.run("parts", preset, END, save_every=MIDDLE, **STATES, **start) == losses
    assert training.hashes("parts", END) == training.hashes("bf16", END)

    again = training.export_state("bf16", END)
    back = training.run("back", "torch", END + 1, state=again)
    on = training.run("on", preset, END + 1, state=again, **STATES)
    assert deviation(back, on) < 1e-6
