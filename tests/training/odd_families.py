"""SDXL with a property that real models may have: what training and switching do with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from zerotrain.models.families.sdxl import FAMILY as SDXL
from zerotrain.models.families.sdxl import Sdxl


class TiedSdxl(Sdxl):
    """One weight in two places: both convolutions of the middle block share theirs."""

    def load_model(self, base: Path) -> torch.nn.Module:
        unet = super().load_model(base)
        first, second = unet.mid_block.resnets
        second.conv1.weight = first.conv1.weight
        return unet


class UnusedSdxl(Sdxl):
    """A layer that nothing calls: its weights are trained, and the loss does not depend on them."""

    def load_model(self, base: Path) -> torch.nn.Module:
        unet = super().load_model(base)
        unet.forgotten = torch.nn.Linear(3, 5)
        return unet


class RunningSdxl(Sdxl):
    """Each forward pass in training changes running statistics, which no checkpoint holds."""

    def load_model(self, base: Path) -> torch.nn.Module:
        unet = super().load_model(base)
        unet.statistics = torch.nn.BatchNorm2d(4, affine=False)
        unet.register_forward_pre_hook(_count)
        return unet


FAMILIES = {
    name: kind(replace(SDXL.spec, name=name))
    for name, kind in {"tied": TiedSdxl, "unused": UnusedSdxl, "running": RunningSdxl}.items()
}


def _count(unet: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    unet.statistics(given[0].detach())
