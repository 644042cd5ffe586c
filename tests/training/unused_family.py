"""SDXL with a layer that nothing calls."""

from __future__ import annotations

from pathlib import Path

import torch

from zerotrain.models.families.sdxl import Sdxl


class UnusedSdxl(Sdxl):
    """The layer's weights are trained, and the loss does not depend on them."""

    name = "unused"

    def load_model(self, base: Path) -> torch.nn.Module:
        unet = super().load_model(base)
        unet.forgotten = torch.nn.Linear(3, 5)
        return unet


FAMILY = UnusedSdxl()
