"""The library's own random generators, which have no history: each step begins them anew."""

from __future__ import annotations

import torch


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the host's generator and the device's as torch.manual_seed would.

    That one also notes, with a stack trace at every call, what every device that the process has
    not touched is to begin with.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
