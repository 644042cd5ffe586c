"""Parameters far from those of a base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zerotrain.models.families import adapters, load_family


def make_trained(
    family: str, base: Path, adapter: dict[str, Any] | None
) -> dict[str, torch.Tensor]:
    """Parameters far from the base's; of an adapter, if there is one."""
    model = load_family(family).load_model(base)
    if adapter:
        model = adapters.add(model, adapter, seed=0)
    return move_far({name: p for name, p in model.named_parameters() if p.requires_grad}, seed=1)


def move_far(parameters: dict[str, torch.nn.Parameter], seed: int) -> dict[str, torch.Tensor]:
    """Values far from these: an untrained model says the same whatever it is asked."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() + 0.2 * torch.randn(p.shape, generator=draw)
        for name, p in parameters.items()
    }
