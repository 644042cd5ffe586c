"""The sections of a run's configuration file, one model each.

Names are those that users of diffusers, accelerate, SimpleTuner and kohya know. Unknown keys are
refused; number-like strings ("1e-4", as command lines and YAML 1.1 leave them) count as numbers.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from zerotrain.config import optimizers
from zerotrain.config.adapters import read_peft
from zerotrain.config.data import DataConfig
from zerotrain.config.families import DEFAULT, FAMILIES, PRESETS
from zerotrain.config.launch import LaunchConfig
from zerotrain.config.section import (
    ConditionedPrompt,
    Name,
    PromptImages,
    Section,
    Side,
    Whole,
    is_none,
)
from zerotrain.config.suggestions import known_names
from zerotrain.config.trained_part import LoraConfig, Pattern
from zerotrain.config.training import TrainConfig
from zerotrain.config.validation import ValidationConfig
from zerotrain.errors import PipelineError


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two, as the number of files")
    return value


Dtype = Literal["fp32", "bf16", "fp16"]
"""Types that tensors are stored in."""


class CacheConfig(Section):
    """How latents and text embeddings are stored."""

    shard_size: Whole = Field(
        256 * 1024**2, ge=1024, description="Largest size of a safetensors shard, in bytes."
    )
    batch_size: Whole | None = Field(
        None,
        ge=1,
        description="Images encoded at a time; other sizes give other last bits. Default: as many "
        "as 1024 x 1024 pixels hold, at most 32; on a GPU as many as half of its memory holds.",
    )
    dtype: Dtype | None = Field(
        None,
        description="Images: type of stored tensors; on a GPU also the one that text encoders "
        "compute in. Default: bf16; fp32 with `base: nano` and `micro`.",
    )
    max_sequence_length: Whole | None = Field(
        None,
        ge=1,
        description="sd3, qwen_image, flux: tokens of a caption, in sampling too; a longer one is "
        "cut. Default: the pipeline's, at most what the tokenizer takes.",
    )
    # Never recorded: any number of jobs gives the same cache.
    shards: Annotated[Whole, AfterValidator(_power_of_two)] = Field(
        1,
        ge=1,
        le=1024,
        exclude=True,
        description="Images: jobs that encode a range of the keys each, on several machines: a "
        "power of two. See [hpc.md](hpc.md).",
    )


class ResolvedCache(CacheConfig):
    """The section `cache` with the values that follow from the rest of a run."""

    dtype: Dtype = "fp32"


def _family(name: str) -> str:
    if name not in FAMILIES:
        raise PydanticCustomError(
            "literal_error", "must be one of {expected}", {"expected": ", ".join(FAMILIES)}
        )
    return name


def _until(value: Any) -> str:
    """Parse a step count, "N epochs" or "N samples" into a string "N unit"."""
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(steps?|epochs?|samples?)?\s*", str(value)
    )
    number = Fraction(match[1]) if match else Fraction(0)
    unit = ((match and match[2]) or "steps").rstrip("s") + "s"
    whole = number.denominator == 1
    if not match or number <= 0 or (unit != "epochs" and not whole):
        raise ValueError('must be a step (300), "3 epochs" or "5000 samples"')
    return f"{number.numerator if whole else match[1]} {unit}"


class Phase(Section):
    """A stretch of training under one launch.

    In a file its training values are next to name, until and launch, and only where they change;
    here they are merged with the run's `train` and `launch` (see read.expand_phases).
    """

    name: Name = Field(description="Its folder under results/<run>/.")
    until: Annotated[str, BeforeValidator(_until)] = Field(
        description='Where the phase ends: a global step (300), "3 epochs" or "5000 samples".'
    )
    launch: LaunchConfig = Field(
        LaunchConfig(),
        description="A preset's name, a mapping with `preset` and overrides, or a file of "
        "accelerate or DeepSpeed.",
    )
    allow: list[Literal["moments", "loss_scale", "ema"]] = Field(
        [],
        description="What the switch into this phase may lose; by default a loss is refused.",
    )
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig | None = Field(
        None,
        description="Values of the run's `validation` that change here; null: none in this phase.",
    )

    @model_validator(mode="after")
    def _batch_divides(self) -> Phase:
        train, processes = self.train, self.launch.num_processes
        parts = train.gradient_accumulation_steps * processes
        if train.global_batch_size % parts:
            raise ValueError(
                f"global_batch_size {train.global_batch_size} is no multiple of "
                f"gradient_accumulation_steps {train.gradient_accumulation_steps} x "
                f"num_processes {processes}"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_under_launch(self) -> Phase:
        """Check the optimizer if a preset is named; what `auto` chooses is checked later."""
        launch, (found, _) = self.launch, optimizers.find(self.train.optimizer)
        refused, hint = optimizers.refusal(
            found.name,
            self.train.optimizer_args,
            engine="torch" if launch.preset in ("torch", "auto") else "deepspeed",
            offload_optimizer="none",
        )
        if refused:
            raise ValueError(f"{refused} (preset {launch.preset}); {hint}")
        return self


def _resume(value: Any) -> Any:
    return {"folder": value} if isinstance(value, str) else value


class ResumeConfig(Section):
    """An external checkpoint, and what it does not say itself."""

    folder: str = Field(description="The checkpoint: a folder, or a file of weights.")
    names: str | None = Field(
        None,
        description="Who is who in a torch optimizer with several param groups, where their shapes "
        "and the run's `param_groups` do not tell: a file with a parameter's name a line, in the "
        "optimizer's order, or `module`: the module's order.",
    )


class ExportConfig(Section):
    """What exported weights are."""

    dtype: Dtype = Field(
        "fp32", description="Type of the exported weights; the training state is always fp32."
    )


class EvaluateConfig(Section):
    """What is measured after each phase."""

    prompts: list[str] = Field(
        [],
        description="Prompts of the grid of images; default: ten distinct captions, spread over "
        "the data. Text: questions that are asked in addition to the held-out ones.",
    )
    conditioning_images: PromptImages | None = Field(
        None,
        exclude_if=is_none,
        description="Images, where samples have conditioning images: files of those of each prompt "
        "in `prompts`, a list for each. Without `prompts` the grid has captions with their own.",
    )
    images_per_prompt: Whole = Field(4, ge=1, description="Images made of each prompt.")
    sizes: list[tuple[Side, Side]] | None = Field(
        None,
        exclude_if=is_none,
        min_length=1,
        description="Images: [width, height] of further grids, in addition to that of squares.",
    )
    num_inference_steps: Whole = Field(30, ge=1, description="Denoising steps of an image.")
    guidance_scale: float | None = Field(
        None,
        ge=0,
        description="How strongly images follow the prompt; 1 and less: no guidance. Default: the "
        "pipeline's own (sdxl 5, sd3 7, qwen_image 4, flux 3.5 for dev and none for schnell).",
    )
    scheduler: Literal["default", "ddim", "euler"] = Field(
        "default", description="Sampler; `default` is the one the base model names."
    )
    batch_size: Whole = Field(8, ge=1, description="Images or answers generated at a time.")
    split: Literal["holdout", "train"] = Field(
        "holdout",
        description="Text: which examples are answered and measured: those of data.holdout, or "
        "those that are trained on, as in PEFT's guide.",
    )
    max_samples: Whole = Field(
        256, ge=1, description="Text: examples that are answered, chosen by their content."
    )
    max_new_tokens: Whole = Field(128, ge=1, description="Text: longest answer, in tokens.")
    judge: Literal["none", "nearest_neighbour"] = Field(
        "none",
        description="nearest_neighbour: classify generated images by the held-out ones, where "
        "captions are classes; needs data.holdout.",
    )


class RunSections(Section):
    """The sections of a run, each of them right on its own."""

    run: Name = Field(description="Name of the folder under results/.")
    seed: Whole = Field(
        0, ge=0, lt=2**32, description="Decides every draw: order, noise, timesteps, a small base."
    )
    family: Annotated[str, AfterValidator(_family)] = Field(
        DEFAULT, description="The model's family.", json_schema_extra={"enum": [*FAMILIES]}
    )
    base: str = Field(
        description="`nano` and `micro` build a small model from the seed; else a folder or hub id "
        "in the layout of diffusers, or of transformers for text. Parts may come from several: "
        "`REPO:FILES,REPO:FILES`, each a folder or hub id and a pattern of its files. Of SDXL also "
        "a single .safetensors file in the original layout."
    )
    revision: str | None = Field(None, description="Commit or tag of the hub id.")
    base_copy: Literal["link", "reflink", "copy"] = Field(
        "link",
        description="How results/ holds the base's files. `link`: symbolic links, which break when "
        "the folder or the hub's cache is removed. `copy`: copies, which share blocks with the "
        "originals where the file system can (btrfs, XFS, ZFS). `reflink`: such copies, or an "
        "error where the file system cannot. Exported weights hold copies in each case.",
    )
    vae: Literal["identity"] | None = Field(
        None,
        description="`identity`: pixels are the latents, for pixel art that an autoencoder would "
        "blur. The exported folder holds an autoencoder of the family's class that gives back "
        "what it is given, so that every tool loads it. The denoiser must take 3 channels: that "
        "of `nano` and `micro` does (qwen_image, flux). Default: the base's own.",
    )
    resume_from_checkpoint: Annotated[ResumeConfig, BeforeValidator(_resume)] | None = Field(
        None,
        description="Start from an external checkpoint (DeepSpeed, accelerate, HF Trainer, peft, "
        "diffusers: see [external-checkpoints.md](external-checkpoints.md)) or a training state: "
        "its folder, or a mapping with `folder` and `names`.",
    )
    prediction_type: Literal["epsilon", "v_prediction"] | None = Field(
        None,
        description="sdxl: what the model is taught to predict, if not what its base was.",
    )
    rescale_betas_zero_snr: bool = Field(
        False,
        description="sdxl: no signal is left at the last timestep (zero terminal SNR), so that "
        "dark and light images can be made; requires prediction_type: v_prediction.",
    )
    lora: LoraConfig | None = Field(
        None, description="Train a LoRA; without this section the whole model."
    )
    peft: Annotated[dict[str, Any], BeforeValidator(read_peft)] | None = Field(
        None,
        description="Train an adapter of another of peft's methods: `peft_type` and any key of its "
        "configuration class. See [adapters.md](adapters.md).",
    )
    base_model_precision: Literal[
        "no_change", "nf4", "int8-quanto", "int4-quanto", "int2-quanto"
    ] = Field(
        "no_change",
        description="Keep the linear layers of the frozen model in 8, 4 or 2 bits while a LoRA "
        "trains. Not with ZeRO 3. See [adapters.md](adapters.md).",
    )
    base_model_exclude_modules: list[str] = Field(
        [],
        description="Ends of the names of layers that base_model_precision leaves as they are; "
        "after a `^` a whole name.",
    )
    frozen_parameters: list[Pattern] = Field(
        [], description="Regular expressions; parameters whose names contain one stay as they are."
    )
    trainable_parameters: list[Pattern] = Field(
        [],
        description="Regular expressions; if there are some, only parameters whose names contain "
        "one are trained.",
    )
    data: DataConfig
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()
    launch: LaunchConfig = LaunchConfig()
    validation: ValidationConfig | None = Field(
        None,
        description="Measure while training: held-out loss, images of prompts, best step, early "
        "stop.",
    )
    phases: list[Phase] = Field(
        min_length=1, description="Stretches of training; each continues where the one before ends."
    )
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    def adapter_values(self) -> dict[str, Any] | None:
        """Return the values of the adapter that is trained, by either section; None for none."""
        return self.lora.values() if self.lora else self.peft

    @property
    def validation_prompts(self) -> list[str | ConditionedPrompt]:
        """Distinct prompts that any phase's validation makes images of.

        A prompt with conditioning images is a tuple of it and of their files.
        """
        found = [phase.validation for phase in self.phases if phase.validation]
        return list(dict.fromkeys(prompt for one in found for prompt in one.asked))

    @property
    def long_captions(self) -> str:
        """What becomes of captions that are too long: the same in all phases."""
        return self.phases[0].train.long_captions

    @property
    def is_text(self) -> bool:
        """Whether the family is one of language models."""
        return FAMILIES[self.family].modality == "text"

    @property
    def is_preset(self) -> bool:
        """Whether the base is built from the seed, for the dataset."""
        return self.base in PRESETS

    @property
    def resolved_cache(self) -> ResolvedCache:
        """The section `cache` with its defaults for this family and base."""
        small = self.is_preset or self.is_text  # tokens have no dtype
        dtype = self.cache.dtype or ("fp32" if small else "bf16")
        return ResolvedCache.model_construct(**{**dict(self.cache), "dtype": dtype})

    def cache_size(self, phase: Phase) -> int:
        """Return the number that names a phase's cache: pixels of a side, or tokens of a row."""
        return phase.train.max_length if self.is_text else phase.train.resolution

    @property
    def data_name(self) -> str:
        """The folder of the dataset and its caches under results/data."""
        return self.data.name or self.run

    def phase(self, name: str) -> Phase:
        """Return the phase of that name.

        Raises:
            PipelineError: no phase has it.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise PipelineError(
            f"the run {self.run} has no phase {name!r}",
            hint=known_names(name, [phase.name for phase in self.phases], "phases"),
        )

    def phase_before(self, name: str) -> Phase | None:
        """Return the phase that the named one continues, or None for the first."""
        index = self.phases.index(self.phase(name))
        return self.phases[index - 1] if index else None
