"""The keys that say what a model is taught: those of denoising, and those of flow matching."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from zerotrain.config.section import Section
from zerotrain.families import FAMILIES


class ObjectiveConfig(Section):
    """What the loss is. A family has some of these keys, and refuses the others."""

    snr_gamma: float | None = Field(
        None, gt=0, description="sdxl: Min-SNR loss weighting (5.0 is usual)."
    )
    noise_offset: float = Field(
        0.0, ge=0, description="sdxl: noise of a whole channel is added at this scale (0.05)."
    )
    weighting_scheme: Literal["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"] | None = (
        Field(
            None,
            description="Flow matching: which timesteps are drawn (logit_normal, mode) or how they "
            "are weighed (sigma_sqrt, cosmap). Default: logit_normal for sd3, none for the others.",
        )
    )
    logit_mean: float = Field(0.0, description="Mean of logit_normal.")
    logit_std: float = Field(1.0, gt=0, description="Standard deviation of logit_normal.")
    mode_scale: float = Field(1.29, description="Scale of mode.")
    flow_shift: float | None = Field(
        None,
        gt=0,
        description="Flow matching: moves timesteps towards noise; default: what the base model's "
        "scheduler says.",
    )
    flux_guidance_value: float = Field(
        1.0, ge=0, description="flux: the guidance that a distilled model (dev) is told."
    )

    def objective(self, family: str) -> dict[str, Any]:
        """The values that mean something to a family."""
        return {key: getattr(self, key) for key in FAMILIES[family].objective}

    def refuse_keys_of_others(self, family: str) -> None:
        """Refuse a key that the user gave and the family does not have.

        Raises:
            ValueError: naming the key, and those that the family has.
        """
        given = self.model_fields_set & ObjectiveConfig.model_fields.keys()
        for key in sorted(given - {*FAMILIES[family].objective}):
            others = ", ".join(name for name, kind in FAMILIES.items() if key in kind.objective)
            own = ", ".join(FAMILIES[family].objective) or "none"
            raise ValueError(
                f"{key} is a key of {others}; the family {family} has of its kind: {own}"
            )
