"""A tiny U-Net, and parameters far from those of a base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel

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


def make_unet(channels: tuple[int, int], *, groups: int = 3, text: int = 16, **changes: Any) -> Any:
    """A U-Net as SDXL's, of two blocks of so many channels."""
    return UNet2DConditionModel(**{
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": channels,
        "layers_per_block": 1, "norm_num_groups": groups, "cross_attention_dim": text,
        "attention_head_dim": 3,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 * 4 + 6, **changes,
    })  # fmt: skip
