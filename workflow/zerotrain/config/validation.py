"""The section that says what is measured while a phase trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from zerotrain.config.section import ConditionedPrompt, PromptImages, Section, Whole, is_none


class ValidationConfig(Section):
    """Measure held-out samples while a phase trains, and make images of prompts.

    Without this section nothing is; `validation: {}` takes every default. It changes no trained
    number. See [validation.md](validation.md).
    """

    eval_steps: Whole = Field(
        500, ge=1, description="Steps between validations; the last step has one, too."
    )
    eval_on_start: bool = Field(
        True, description="One before the phase's first step, to compare with; never the best."
    )
    max_samples: Whole | None = Field(
        None,
        ge=1,
        description="Held-out samples that are measured, chosen by their content; default: as many "
        "as `evaluate` takes (64 images, 256 examples of text).",
    )
    batch_size: Whole = Field(8, ge=1, description="Held-out samples measured at a time.")
    prompts: list[str] = Field(
        [], description="Images: prompts of the grid of each validation; none: no images are made."
    )
    conditioning_images: PromptImages | None = Field(
        None,
        exclude_if=is_none,
        description="Images, where samples have conditioning images: files of those of each prompt "
        "in `prompts`, a list for each.",
    )
    images_per_prompt: Whole = Field(
        1, ge=1, description="Images made of each prompt, by the seeds of `evaluate`."
    )
    num_inference_steps: Whole = Field(30, ge=1, description="Denoising steps of an image.")
    guidance_scale: float | None = Field(
        None,
        ge=0,
        description="How strongly images follow the prompt; default: the pipeline's own.",
    )
    scheduler: Literal["default", "ddim", "euler"] = Field(
        "default", description="Sampler; `default` is the one the base model names."
    )
    decode: Literal["process", "inline"] = Field(
        "process",
        description="Who makes images of the sampled latents: a process of its own on the CPU, "
        "next to the training, or the first process of the training on its device.",
    )
    metric_for_best_model: Literal["val_loss", "val_loss_ema"] | None = Field(
        None,
        description="What the best checkpoint has least of; default: val_loss_ema with use_ema, "
        "else val_loss.",
    )
    load_best_model_at_end: bool = Field(
        False, description="Publish the phase's best checkpoint instead of its last one."
    )
    early_stopping_patience: Whole | None = Field(
        None,
        ge=1,
        description="End the phase after so many validations in a row that are no better; "
        "default: never.",
    )
    early_stopping_threshold: float = Field(
        0.0, ge=0, description="How much lower the metric must be to count as better."
    )

    @property
    def asked(self) -> list[str | ConditionedPrompt]:
        """The prompts; one with conditioning images is a tuple of it and of their files."""
        if self.conditioning_images is None:
            return [*self.prompts]
        pairs = zip(self.prompts, self.conditioning_images, strict=True)
        return [(prompt, tuple(files)) for prompt, files in pairs]

    @model_validator(mode="after")
    def _threshold_is_read(self) -> ValidationConfig:
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError(
                "early_stopping_threshold says what counts as better for early_stopping_patience, "
                "which is not set"
            )
        return self
