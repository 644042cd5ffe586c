"""AdamW with 8-bit moments, stepped by bitsandbytes; a state holds them as float32.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022),
https://arxiv.org/abs/2110.02861. Small parameters keep float32 moments.
"""

from __future__ import annotations

from collections.abc import Mapping

import bitsandbytes  # type: ignore[import-not-found,unused-ignore]
import torch

from zerotrain.training.optim.block_codes import decode, encode

SLOTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""torch's names of the moments, and bitsandbytes' number for each."""


class AdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]
    """bitsandbytes' class, with moments that are read and filled by torch's names."""

    def read_slot(self, parameter: torch.Tensor, slot: str) -> torch.Tensor:
        """Return a moment as float32 in the parameter's shape."""
        state, number = self.state[parameter], SLOTS[slot]
        held: torch.Tensor = state[f"state{number}"]
        if held.dtype == torch.uint8:
            return decode(held, state[f"absmax{number}"], state[f"qmap{number}"])
        return held

    def fill(
        self, parameter: torch.Tensor, updates: int, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """Load moments; those that read_slot returned get the same codes again."""
        at, group = next(
            (i, g)
            for i, g in enumerate(self.param_groups)
            if any(p is parameter for p in g["params"])
        )
        place = next(i for i, p in enumerate(group["params"]) if p is parameter)
        self.init_state(group, parameter, at, place)
        state = self.state[parameter]
        state["step"] = updates
        for slot, values in slots.items():
            held = state[f"state{SLOTS[slot]}"]
            if held.dtype == torch.uint8:
                codes, largest = encode(values, state[f"qmap{SLOTS[slot]}"])
                held.copy_(codes)
                state[f"absmax{SLOTS[slot]}"].copy_(largest)
            else:
                held.copy_(values)
