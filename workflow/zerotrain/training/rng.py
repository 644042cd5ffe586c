"""torch's random generators, which carry no history: each step seeds them again."""

from __future__ import annotations

import torch


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the host's generator and the device's as torch.manual_seed would.

    torch.manual_seed also stores, with a stack trace per call, the seed of every device that the
    process has not initialized.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
