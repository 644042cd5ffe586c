"""Adapters of a nano SDXL, and how far two U-Nets are apart."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from zerotrain.models.families.lora import add_adapter, save_adapter
from zerotrain.models.families.sdxl import FAMILY

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
SETTINGS = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ATTENTION}


def make_adapted(base: Path, *, seed: int = 0, trained: bool = True, **changes: object):
    """The base's U-Net with an adapter, in eval mode; trained: its second factor is not zero."""
    unet = FAMILY.load_model(base)
    add_adapter(unet, seed=seed, **(SETTINGS | changes))
    unet.eval()  # dropout is added in train mode
    if trained:
        source = torch.Generator().manual_seed(1)
        for name, parameter in adapter_of(unet).items():
            if ".lora_B." in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=source)
    return unet


def adapter_of(unet: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training would change."""
    return {name: p for name, p in unet.named_parameters() if p.requires_grad}


def write_adapter(
    base: Path, unet: torch.nn.Module, out: Path, **changes: object
) -> dict[str, str]:
    """Write the adapter of a model, as an export does."""
    tensors = adapter_of(unet)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    dtype: Any = changes.pop("dtype", torch.float32)
    settings = SETTINGS | changes
    return save_adapter(FAMILY, base, shapes, tensors.__getitem__, settings, dtype=dtype, out=out)


def predict(unet: torch.nn.Module) -> torch.Tensor:
    """The U-Net's answer [2, 4, 4, 4] to fixed inputs, in the precision of its weights."""
    source = torch.Generator().manual_seed(2)
    dtype = next(unet.parameters()).dtype
    sample, text, pooled = (
        torch.randn(shape, generator=source).to(dtype)
        for shape in ((2, 4, 4, 4), (2, 5, 128), (2, 64))
    )
    return unet(
        sample,
        torch.tensor([10, 700]),
        encoder_hidden_states=text,
        added_cond_kwargs={"text_embeds": pooled, "time_ids": torch.full((2, 6), 16.0)},
        return_dict=False,
    )[0]


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Largest difference of two U-Nets' answers.

    Both are asked as copies in float64, so that only their weights differ, not the rounding of a
    processor's kernels.
    """
    with torch.inference_mode():
        first, second = (
            predict(copy.deepcopy(model).requires_grad_(False).double()) for model in (one, other)
        )
        return (first - second).abs().max().item()


SHORT_ATTENTION = ["attn1.to_q", "attn1.to_v"]
"""Layers of 15 to 15, which blocks of 3 divide."""
LAYER_METHODS: dict[str, dict[str, Any]] = {
    "C3A": {"block_size": 3, "target_modules": SHORT_ATTENTION},
    # By its default scaling, 150, a last bit of an optimizer step would be 1e-5 of a loss.
    "FOURIERFT": {"n_frequency": 20, "scaling": 1.0},
    "GLORA": {"r": 3},
    "GRALORA": {"r": 3, "gralora_k": 3, "target_modules": SHORT_ATTENTION},
    "HIRA": {"r": 3},
    "HRA": {"r": 4, "target_modules": ["to_q", "conv1"]},
    "IA3": {},
    "LOHA": {"r": 3, "alpha": 6, "target_modules": ["to_q", "conv1"]},
    "LOKR": {"r": 3, "alpha": 6, "target_modules": ["to_q", "conv1"]},
    "MISS": {"r": 3, "target_modules": SHORT_ATTENTION},
    "OFT": {"oft_block_size": 3, "target_modules": SHORT_ATTENTION},
    "PEANUT": {"r": 3},
    "ROAD": {"group_size": 2, "target_modules": ["ff.net.0.proj"]},
}
