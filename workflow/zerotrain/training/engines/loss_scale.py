"""fp16's loss scale: DeepSpeed's rule for the torch engine; its state passes between all engines.

An overflow uses up one of `hysteresis`, and halves the scale if only one is left. After every
`loss_scale_window` updates without one, the next good update restores the hysteresis and doubles
the scale. (The rule of DeepSpeed's runtime/fp16/loss_scaler.py; a test compares the two.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.config.launch import Fp16Config

FACTOR = 2.0


class LossScale:
    """The scale of the losses, and the counters that decide when it changes."""

    def __init__(self, settings: Fp16Config) -> None:
        """Start as `fp16` of the resolved phase says; a loss_scale other than 0 never changes."""
        self._settings = settings
        self.dynamic = settings.loss_scale == 0
        power = settings.initial_scale_power
        self.scale = float(2**power if self.dynamic else settings.loss_scale)
        self._good_steps, self._hysteresis = 0, int(settings.hysteresis)

    def update(self, overflow: bool) -> None:
        """Set the scale of the next step by whether the gradients of this one overflowed."""
        if not self.dynamic:
            return
        window, hysteresis = self._settings.loss_scale_window, self._settings.hysteresis
        if overflow:
            if self._hysteresis == 1:
                self.scale = max(self.scale / FACTOR, float(self._settings.min_loss_scale))
            else:
                self._hysteresis -= 1
            self._good_steps = 0
        elif self._good_steps == window:
            self.scale *= FACTOR
            self._good_steps, self._hysteresis = 1, hysteresis
        else:
            self._good_steps += 1

    def state(self) -> dict[str, Any]:
        """Return the scale, the good steps since its last change or overflow, and hysteresis."""
        return {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "hysteresis": self._hysteresis,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, in this engine or another; a fixed scale stays."""
        if self.dynamic:
            state = clamp_state(state, self._settings)
            self.scale, self._good_steps = state["scale"], state["good_steps"]
            self._hysteresis = state["hysteresis"]


def clamp_state(state: Mapping[str, Any], settings: Fp16Config) -> dict[str, Any]:
    """Return a loss scale's state within other settings: a due change comes at the next step."""
    hysteresis = settings.hysteresis
    return {
        "scale": float(state["scale"]),
        "good_steps": min(int(state["good_steps"]), settings.loss_scale_window),
        "hysteresis": min(int(state.get("hysteresis", hysteresis)), hysteresis),
    }


def is_at_minimum(state: Mapping[str, Any], settings: Fp16Config) -> bool:
    """Return whether an overflow can no longer lower the scale: it is fixed, or at its lowest.

    Then the training has diverged, or the fixed scale is too high.
    """
    lowest = bool(state["scale"] <= settings.min_loss_scale)
    return bool(settings.loss_scale) or (lowest and state["hysteresis"] == 1)
