"""The settings of each stage: all that it reads of a run's configuration.

A stage takes its settings and no other part of the configuration. Its rule records their fields as
parameters, so that a changed value reruns the job, except for fields that are Unrecorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeAlias

from zerotrain.config.data import DataConfig
from zerotrain.config.models import (
    CacheConfig,
    EvaluateConfig,
    ExportConfig,
    Phase,
    ResumeConfig,
    RunSections,
)
from zerotrain.config.section import ConditionedPrompt, Section
from zerotrain.config.training import LoraConfig, ParamGroup, TrainConfig


@dataclass(frozen=True)
class Unrecorded:
    """The reason why no rule has to record a field."""

    reason: str


OF_CODE = Unrecorded("the module of the family is a part of the parameter `code`")
OF_MESSAGES = Unrecorded("is only named in messages")
OF_DATASET = Unrecorded("samples are read through the dataset's manifest, which has their hashes")
OF_CACHE = Unrecorded("with other captions the cache is another one, which is an input")
OF_WEIGHTS = Unrecorded("the weights, which are an input, were made with it")
OF_EVALUATION = Unrecorded("is shown next to the evaluations, which came after it")
OF_PLANNER = Unrecorded("only `launch: auto` reads it, and keeps what it chose")


class StageSettings(Section):
    """What a stage reads of the configuration; fields are named as the parameters of its rule."""

    @classmethod
    def of(cls, config: RunSections, phase: str = "") -> Self:
        """Take the settings from a run's configuration.

        Args:
            config: The run's configuration.
            phase: Name of the phase, if the stage's job is one of a phase.

        Raises:
            PipelineError: no phase has that name.
        """
        derived = cls._derived(config, phase)
        names = cls.model_fields.keys() - derived.keys()
        return cls(**{name: getattr(config, name) for name in names}, **derived)

    @classmethod
    def _derived(cls, config: RunSections, phase: str) -> dict[str, Any]:
        """Return the fields that are not attributes of the configuration."""
        return {}

    @classmethod
    def recorded(cls) -> list[str]:
        """List the fields that the stage's rule records."""
        return [
            name
            for name, field in cls.model_fields.items()
            if not any(isinstance(one, Unrecorded) for one in field.metadata)
        ]


class TrainedPartSettings(StageSettings):
    """What decides which part of the model is trained."""

    lora: LoraConfig | None
    peft: dict[str, Any] | None
    frozen_parameters: list[str]
    trainable_parameters: list[str]

    def adapter_values(self) -> dict[str, Any] | None:
        """Return the values of the adapter that is trained; None for none."""
        return self.lora.values() if self.lora else self.peft


class BuildSettings(StageSettings):
    """What build_base reads. A real model is taken as it is, without seed and resolution."""

    base: str
    revision: str | None
    base_copy: str
    prediction_type: str | None
    rescale_betas_zero_snr: bool
    vae: str | None
    seed: int | None
    resolution: int | None
    num_cpu_threads_per_process: int | None
    is_preset: Annotated[bool, Unrecorded("follows from base")]
    family: Annotated[str, OF_CODE]
    is_text: Annotated[bool, OF_CODE]
    data: Annotated[DataConfig, OF_DATASET]

    @classmethod
    def _derived(cls, config: RunSections, phase: str) -> dict[str, Any]:
        preset = config.is_preset
        return {
            "seed": config.seed if preset else None,
            "resolution": config.phases[0].train.resolution if preset else None,
            "num_cpu_threads_per_process": config.launch.num_cpu_threads_per_process,
        }


class CacheSettings(StageSettings):
    """What cache_latents reads."""

    cache: CacheConfig
    validation_prompts: list[str | ConditionedPrompt]
    packing: bool
    long_captions: str
    virtual_tokens: int | None
    num_cpu_threads_per_process: int | None
    base: Annotated[str, OF_MESSAGES]
    family: Annotated[str, OF_CODE]
    data: Annotated[DataConfig, OF_DATASET]

    @classmethod
    def _derived(cls, config: RunSections, phase: str) -> dict[str, Any]:
        return {
            "packing": config.phases[0].train.packing,
            "virtual_tokens": (config.peft or {}).get("num_virtual_tokens"),
            "num_cpu_threads_per_process": config.launch.num_cpu_threads_per_process,
        }


class ImportSettings(TrainedPartSettings):
    """What import_checkpoint reads; values of training are those of the first phase."""

    resume_from_checkpoint: ResumeConfig | None
    seed: int
    batch: int
    param_groups: list[ParamGroup]
    no_decay_norm_bias: bool
    allow: list[str]
    phase: Annotated[str, OF_MESSAGES]
    train: Annotated[
        TrainConfig,
        Unrecorded("rates and decays tell groups apart that have them in `param_groups`; a job "
                   "that misses moments of its optimizer fails"),
    ]  # fmt: skip
    family: Annotated[str, OF_CODE]

    @classmethod
    def _derived(cls, config: RunSections, phase: str) -> dict[str, Any]:
        first = config.phases[0]
        return {
            "batch": first.train.global_batch_size,
            "param_groups": first.train.param_groups,
            "no_decay_norm_bias": first.train.no_decay_norm_bias,
            "allow": first.allow,
            "phase": first.name,
            "train": first.train,
        }


class LaunchSettings(TrainedPartSettings):
    """What render_launch reads, and with it the resolver and the planner."""

    seed: int
    family: str
    base_model_precision: str
    base_model_exclude_modules: list[str]
    phases: list[Phase]
    """The phase, after those before it."""
    run: Annotated[str, Unrecorded("is part of every path")]
    later: Annotated[list[Phase], Unrecorded("training keeps the horizon that it began with")]
    given: Annotated[frozenset[str], Unrecorded("tells what the user set, a value or its default")]
    is_text: Annotated[bool, Unrecorded("follows from family")]
    is_preset: Annotated[bool, OF_PLANNER]
    base: Annotated[str, OF_PLANNER]
    cache: Annotated[CacheConfig, OF_PLANNER]
    data: Annotated[DataConfig, OF_PLANNER]
    export: Annotated[ExportConfig, OF_PLANNER]

    @classmethod
    def _derived(cls, config: RunSections, phase: str) -> dict[str, Any]:
        end = config.phases.index(config.phase(phase)) + 1
        phases, later = config.phases[:end], config.phases[end:]
        return {"phases": phases, "later": later, "given": config.model_fields_set}

    def phase(self, name: str) -> Phase:
        """Return the phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    def cache_size(self, phase: Phase) -> int:
        """Return the number that names a phase's cache, as RunSections.cache_size does."""
        return phase.train.max_length if self.is_text else phase.train.resolution


PlannedRun: TypeAlias = RunSections | LaunchSettings
"""What the planner takes: a run, or the settings of the stage that plans for `launch: auto`."""


class ExportSettings(TrainedPartSettings):
    """What export_weights reads."""

    export: ExportConfig
    family: Annotated[str, OF_CODE]
    max_sequence_length: Annotated[int | None, OF_CACHE]
    long_captions: Annotated[str, OF_CACHE]
    prompt_template: Annotated[str | None, OF_CACHE]

    @classmethod
    def _derived(cls, config: RunSections, phase: str) -> dict[str, Any]:
        return {
            "max_sequence_length": config.cache.max_sequence_length,
            "prompt_template": config.data.prompt_template,
        }


class EvaluateSettings(StageSettings):
    """What evaluate reads."""

    evaluate: EvaluateConfig
    seed: int
    phase: Annotated[str, Unrecorded("is part of every path")]
    family: Annotated[str, OF_CODE]
    is_text: Annotated[bool, OF_CODE]
    data: Annotated[DataConfig, OF_DATASET]
    max_sequence_length: Annotated[int | None, OF_CACHE]
    long_captions: Annotated[str, OF_CACHE]
    train: Annotated[TrainConfig, OF_WEIGHTS]
    num_cpu_threads_per_process: Annotated[int | None, OF_WEIGHTS]

    @classmethod
    def _derived(cls, config: RunSections, phase: str) -> dict[str, Any]:
        chosen = config.phase(phase)
        return {
            "phase": phase,
            "max_sequence_length": config.cache.max_sequence_length,
            "train": chosen.train,
            "num_cpu_threads_per_process": chosen.launch.num_cpu_threads_per_process,
        }


class ReportSettings(StageSettings):
    """What report reads."""

    run: Annotated[str, OF_EVALUATION]
    family: Annotated[str, OF_EVALUATION]
    is_text: Annotated[bool, OF_EVALUATION]
    base: Annotated[str, OF_EVALUATION]
    revision: Annotated[str | None, OF_EVALUATION]
    data: Annotated[DataConfig, OF_EVALUATION]
    seed: Annotated[int, OF_EVALUATION]
    evaluate: Annotated[EvaluateConfig, OF_EVALUATION]
    max_sequence_length: Annotated[int | None, OF_EVALUATION]
    long_captions: Annotated[str, OF_EVALUATION]
    trains: Annotated[dict[str, TrainConfig], OF_EVALUATION]
    """The training values of each phase, by its name."""

    @classmethod
    def _derived(cls, config: RunSections, phase: str) -> dict[str, Any]:
        return {
            "max_sequence_length": config.cache.max_sequence_length,
            "trains": {one.name: one.train for one in config.phases},
        }


SETTINGS: Mapping[str, type[StageSettings]] = {
    "build_base": BuildSettings,
    "cache_latents": CacheSettings,
    "import_checkpoint": ImportSettings,
    "render_launch": LaunchSettings,
    "export_weights": ExportSettings,
    "evaluate": EvaluateSettings,
    "report": ReportSettings,
}
"""The settings of each stage, by its rule. prepare_dataset takes the section `data` itself, and
train_phase reads the launch files alone."""
