"""Page-locked memory: large buffers take their own size, and a user's own setting stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotrain.launch.zero import LIMIT, allocator_settings, cached_bytes, rounding

KEY = "pinned_max_cached_size_mb"
OFFLOADED: Any = SimpleNamespace(
    derived=SimpleNamespace(offload_optimizer="cpu", offload_param="none")
)
NOTHING: Any = SimpleNamespace(
    derived=SimpleNamespace(offload_optimizer="none", offload_param="none")
)


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": f"{KEY}:16"}),
        ({"PYTORCH_ALLOC_CONF": f"{KEY}:8"}, {}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{KEY}:16"},
        ),
    ],
)
def test_the_setting_joins_the_users(own: dict[str, str], found: dict[str, str]) -> None:
    """In the variable that the user has set, since torch reads one of them."""
    assert allocator_settings(OFFLOADED, own) == found
    assert allocator_settings(NOTHING, own) == {}


@pytest.mark.parametrize(("release", "set_"), [("2.12.1", False), ("2.13.0+cu130", True)])
def test_an_earlier_torch_is_not_told_a_name_that_it_refuses(
    release: str, set_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end with "Unrecognized key" when it first uses the GPU."""
    monkeypatch.setattr("zerotrain.launch.zero.version", lambda package: release)
    assert bool(allocator_settings(OFFLOADED, {})) == set_


def test_torch_knows_the_setting() -> None:
    """A newer torch that renames it fails here, and not by taking half as much memory again: of a
    key that it does not know, torch's CPU build reads no value, and its CUDA build says so."""
    settings: Any = torch._C
    (value,) = allocator_settings(OFFLOADED, {}).values()
    settings._accelerator_setAllocatorSettings(value)
    with pytest.raises(ValueError, match="stoull"):
        settings._accelerator_setAllocatorSettings(f"{KEY}:much")


def test_rounding_is_to_powers_of_two_up_to_the_limit() -> None:
    assert rounding([2**20, 2**20 + 1, 0]) == 2**20 - 1
    assert rounding([LIMIT, LIMIT + 1]) == 0
    assert cached_bytes([3 * 2**20, LIMIT + 1]) == 4 * 2**20
