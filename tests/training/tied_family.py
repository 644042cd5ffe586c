"""SDXL with one weight in two places: what training and switching do with a tied parameter."""

from __future__ import annotations

from pathlib import Path

import torch

from zerotrain.models.families.sdxl import Sdxl


class TiedSdxl(Sdxl):
    """Both convolutions of the middle block share their weights."""

    name = "tied"

    def load_model(self, base: Path) -> torch.nn.Module:
        unet = super().load_model(base)
        first, second = unet.mid_block.resnets
        second.conv1.weight = first.conv1.weight
        return unet


FAMILY = TiedSdxl()
