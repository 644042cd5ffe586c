"""The target of exported weights: their folder, and the values that complete them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.config.data import ALPACA
from zerotrain.config.stage_settings import ExportSettings
from zerotrain.config.trained_part import is_frozen
from zerotrain.models.families import Family, load_family
from zerotrain.state.position import Source


@dataclass(frozen=True)
class WeightsTarget:
    """The folder of exported weights, and the values that complete them."""

    folder: Path
    """Folder to publish them at, for the model's own library."""
    base: Path
    """The base model's folder, published or saved by diffusers."""
    family: Family
    dtype: str
    """Their type, a key of FLOAT_TYPES."""
    frozen_parameters: Sequence[str] = ()
    """Regular expressions of parameters that training left as in the base."""
    lora: Mapping[str, Any] | None = None
    """rank, alpha, dropout and target_modules of the trained LoRA, if there is one."""
    peft: Mapping[str, Any] | None = None
    """peft_type and values of the trained adapter of another method, if there is one."""
    trainable_parameters: Sequence[str] = ()
    """Regular expressions; if any, parameters without a match were left as in the base."""
    max_sequence_length: int | None = None
    """Tokens of a prompt in training, if not the family's default."""
    long_captions: str = "truncate"
    """Treatment of prompts that are too long for the text encoders."""
    prompt_template: str | None = None
    """`alpaca` if prompts were trained in that text, without chat template and line break."""
    ema: bool = True
    """Whether the averaged weights are written if the training kept them."""

    @classmethod
    def of(
        cls, settings: ExportSettings, base: Path, folder: Path, dtype: str | None = None
    ) -> WeightsTarget:
        """Return the target that a run's configuration describes."""
        return cls(
            folder=folder,
            base=base,
            family=load_family(settings.family),
            dtype=dtype or settings.export.dtype,
            frozen_parameters=settings.frozen_parameters,
            lora=settings.lora.values() if settings.lora else None,
            peft=settings.peft,
            trainable_parameters=settings.trainable_parameters,
            max_sequence_length=settings.max_sequence_length,
            long_captions=settings.long_captions,
            prompt_template=ALPACA if settings.prompt_template == ALPACA else None,
        )

    def content(self, step: int, averaged: bool, resolution: int | None = None) -> dict[str, Any]:
        """Return the content of the weights' manifest.

        Users of the model read there how prompts were handled and the training's resolution in
        pixels.
        """
        length, chunk = self.max_sequence_length, self.long_captions
        return {
            "family": self.family.name,
            "step": step,
            "dtype": self.dtype,
            **({} if length is None else {"max_sequence_length": length}),
            **({} if chunk == "truncate" else {"long_captions": chunk}),
            **({"prompt_template": self.prompt_template} if self.prompt_template else {}),
            **({"ema": True} if averaged else {}),
            **({"resolution": resolution} if resolution else {}),
        }

    @property
    def torch_dtype(self) -> torch.dtype:
        """Their type in torch."""
        return FLOAT_TYPES[self.dtype]

    def frozen(self, source: Source) -> Callable[[str], bool]:
        """Return a function that tells whether training left a parameter unchanged."""
        known = getattr(source, "frozen", ())
        return lambda name: (
            name in known or is_frozen(name, self.frozen_parameters, self.trainable_parameters)
        )

    @property
    def adapter(self) -> bool:
        """Whether an adapter was trained instead of the model itself."""
        return self.lora is not None or self.peft is not None
