"""The keys that say what a model is taught: those of denoising, and those of flow matching."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from zerotrain.config.families import FAMILIES
from zerotrain.config.families.spec import LOSS
from zerotrain.config.section import Section


class ObjectiveConfig(Section):
    """What the loss is. A family has some of these keys, and refuses the others."""

    loss_type: Literal["l2", "l1", "huber", "smooth_l1"] = Field(
        "l2",
        description="Cost of an error: its square, its absolute value, or `huber` and `smooth_l1`, "
        "which are squares below a threshold and lines above. Validation measures l2.",
    )
    huber_c: float = Field(0.1, gt=0, description="Threshold of huber and smooth_l1.")
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        "snr",
        description="How that threshold falls from 1 for clean latents to huber_c for noise; "
        "`constant`: it is huber_c.",
    )
    snr_gamma: float | None = Field(
        None, gt=0, description="sdxl: Min-SNR loss weighting (5.0 is usual)."
    )
    noise_offset: float = Field(
        0.0, ge=0, description="sdxl: noise of a whole channel is added at this scale (0.05)."
    )
    weighting_scheme: (
        Literal["none", "logit_normal", "mode", "sigma_sqrt", "cosmap", "gaussian"] | None
    ) = Field(
        None,
        description="Flow matching: which timesteps are drawn (logit_normal, mode) or how they are "
        "weighed (sigma_sqrt, cosmap; gaussian is DiffSynth-Studio's). Default: logit_normal for "
        "sd3, none for the others.",
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
    precondition_outputs: bool = Field(
        False,
        description="sd3: the error is that of the image instead of the velocity, as diffusers' "
        "scripts have it: the loss times the square of the noise's share.",
    )
    flux_guidance_value: float = Field(
        1.0, ge=0, description="flux: guidance embedding passed to guidance-distilled models (dev)."
    )

    def objective(self, family: str) -> dict[str, Any]:
        """Return the values that mean something to a family.

        Those of l2 and of the velocity, which are older than the other choices, are left out.
        """
        keys = [
            key
            for key in FAMILIES[family].objective
            if (self.loss_type != "l2" or key not in LOSS)
            and (self.precondition_outputs or key != "precondition_outputs")
        ]
        return {key: getattr(self, key) for key in keys}

    def check_keys_of_family(self, family: str) -> None:
        """Check that the family has every key that the user gave.

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
