"""The settings of each stage: all that it reads of a run's configuration.

A stage takes its settings and no other part of the configuration. What it publishes records them in
its recipe, so that a changed value reruns the job, except for Unrecorded ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias, cast

from zerotrain.artifact.documents import check_type, read_object
from zerotrain.artifact.recipe import Recipe
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.config.data import DataConfig
from zerotrain.config.models import (
    CacheConfig,
    EvaluateConfig,
    ExportConfig,
    Phase,
    ResolvedCache,
    ResumeConfig,
    RunSections,
)
from zerotrain.config.section import ConditionedPrompt, Section
from zerotrain.config.trained_part import LoraConfig, ParamGroup
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError


@dataclass(frozen=True)
class From:
    """The place of a value in a run, if it is not the attribute of the field's name."""

    path: str
    """Attributes, keys and indices; `phase` is the job's phase."""


@dataclass(frozen=True)
class Unrecorded:
    """The reason why a recipe need not record a field."""

    reason: str


OF_FAMILY = Unrecorded("follows from family")
OF_MESSAGES = Unrecorded("is only named in messages")
OF_PATHS = Unrecorded("is part of every path")
OF_DATASET = Unrecorded("samples are read through the dataset's manifest, which has their hashes")
OF_CACHE = Unrecorded("with other captions the cache is another one, which is an input")
OF_WEIGHTS = Unrecorded("the weights, which are an input, were made with it")
OF_EVALUATION = Unrecorded("is shown next to the evaluations, which came after it")
OF_HORIZON = Unrecorded("training keeps the horizon that it began with")
OF_PLANNER = Unrecorded("only `launch: auto` reads it, whose choice stands")
OF_GROUPS = Unrecorded("tells apart groups of `param_groups`; without its moments the job fails")
THREADS = From("launch.num_cpu_threads_per_process")
MAX_SEQUENCE_LENGTH = From("cache.max_sequence_length")


class StageSettings(Section):
    """The part of the configuration that a stage reads."""

    @classmethod
    def of(cls, config: RunSections, phase: str = "") -> Self:
        """Return what the stage reads of a run, and of its phase if its jobs are those of phases.

        Raises:
            PipelineError: no phase has that name.
        """
        own = {"phase": config.phase(phase)} if phase else {}
        values = {
            name: _find(own if path.startswith("phase.") else config, path)
            for name, path in cls.paths().items()
        }
        values = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in values.items()
        }
        # The values are of a run that is valid; to build validators again would take longer than
        # the rest of a plan.
        return cast(Self, cls.model_construct(**values))

    @classmethod
    def paths(cls, *, recorded: bool = False) -> dict[str, str]:
        """Return the place of each field in a run; of those alone that a recipe records."""
        found = {}
        for name, field in cls.model_fields.items():
            kinds = {type(one): one for one in field.metadata}
            if not (recorded and Unrecorded in kinds):
                found[name] = kinds[From].path if From in kinds else name
        return found

    def recorded(self) -> dict[str, Any]:
        """Return the values that a recipe records, by their keys in the configuration.

        Keys at their defaults are left out: a new key with a default changes no recipe.
        """
        names = self.paths(recorded=True)
        values = self.model_dump(mode="json", include={*names}, exclude_defaults=True)
        return {
            names[name].removeprefix("phases.0.").removeprefix("phase."): value
            for name, value in values.items()
            if value is not None
        }

    def by_key(self) -> dict[str, Any]:
        """Return the recorded values by their keys in the configuration, each as it is."""
        found: dict[str, Any] = {}
        for name, path in self.paths(recorded=True).items():
            key, value = path.removeprefix("phases.0."), getattr(self, name)
            inner = [*value] if isinstance(value, Section) else []
            found |= {f"{key}.{one}": own for one, own in inner} or {key: value}
        return found


def _find(value: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(value, list):
            value = value[int(name)]
        elif isinstance(value, Mapping) or value is None:
            value = (value or {}).get(name)
        else:
            value = getattr(value, name)
    return value


class TrainedPartSettings(StageSettings):
    """The settings that decide which part of the model is trained."""

    lora: LoraConfig | None
    peft: dict[str, Any] | None
    frozen_parameters: list[str]
    trainable_parameters: list[str]

    def adapter_values(self) -> dict[str, Any] | None:
        """Return the values of the adapter that is trained; None for none."""
        return self.lora.values() if self.lora else self.peft


class PrepareSettings(StageSettings):
    """The settings of prepare_dataset."""

    data: DataConfig
    resolution: Annotated[int, From("phases"), Unrecorded("is only for the printed summary")]
    """The largest of all phases."""

    @classmethod
    def of(cls, config: RunSections, phase: str = "") -> Self:
        """Return the settings of a run's stage."""
        largest = max(phase.train.resolution for phase in config.phases)
        return super().of(config).model_copy(update={"resolution": largest})

    def recorded(self) -> dict[str, Any]:
        """Return the values that a recipe records: not the name, nor the number of workers."""
        without = {"name", "num_workers"}
        return {"data": self.data.model_dump(mode="json", exclude=without, exclude_defaults=True)}


class BuildSettings(StageSettings):
    """The settings of build_base; seed and resolution are None for a real model."""

    family: str
    base: str
    revision: str | None
    base_copy: str
    prediction_type: str | None
    rescale_betas_zero_snr: bool
    vae: str | None
    seed: int | None
    resolution: Annotated[int | None, From("phases.0.train.resolution")]
    num_cpu_threads_per_process: Annotated[int | None, THREADS]
    is_preset: Annotated[bool, Unrecorded("follows from base")]
    is_text: Annotated[bool, OF_FAMILY]
    data: Annotated[DataConfig, OF_DATASET]

    @classmethod
    def of(cls, config: RunSections, phase: str = "") -> Self:
        """Return the settings of a run's stage."""
        found = super().of(config)
        real = {"seed": None, "resolution": None}
        return found if found.is_preset else found.model_copy(update=real)


class CacheSettings(StageSettings):
    """The settings of cache_latents."""

    cache: ResolvedCache
    validation_prompts: list[str | ConditionedPrompt]
    packing: Annotated[bool, From("phases.0.train.packing")]
    long_captions: Annotated[str, From("phases.0.train.long_captions")]
    num_cpu_threads_per_process: Annotated[int | None, THREADS]
    base: Annotated[str, OF_MESSAGES]
    family: str
    data: Annotated[DataConfig, OF_DATASET]

    @classmethod
    def of(cls, config: RunSections, phase: str = "") -> Self:
        """Return the settings of a run's stage."""
        return super().of(config).model_copy(update={"cache": config.resolved_cache})


class ImportSettings(TrainedPartSettings):
    """The settings of import_checkpoint; the folder is an option of its command."""

    folder: Annotated[str | None, From("resume_from_checkpoint.folder")]
    resume_from_checkpoint: ResumeConfig | None
    seed: int
    batch: Annotated[int, From("phases.0.train.global_batch_size")]
    param_groups: Annotated[list[ParamGroup], From("phases.0.train.param_groups")]
    no_decay_norm_bias: Annotated[bool, From("phases.0.train.no_decay_norm_bias")]
    allow: Annotated[list[str], From("phases.0.allow")]
    phase: Annotated[str, From("phases.0.name"), OF_MESSAGES]
    train: Annotated[TrainConfig, From("phases.0.train"), OF_GROUPS]
    family: str


class LaunchSettings(TrainedPartSettings):
    """The settings of render_launch, of its resolver and of the planner."""

    seed: int
    family: str
    base_model_precision: str
    base_model_exclude_modules: list[str]
    phases: list[Phase]
    """The phase, after those before it."""
    max_sequence_length: Annotated[int | None, MAX_SEQUENCE_LENGTH]
    """The value of `cache` where `launch: auto` plans with it; None with any other launch."""
    later: Annotated[list[Phase], From("phases"), OF_HORIZON]
    run: Annotated[str, OF_PATHS]
    given: Annotated[list[str], From("model_fields_set"), Unrecorded("tells who set a value")]
    is_text: Annotated[bool, OF_FAMILY]
    is_preset: Annotated[bool, OF_PLANNER]
    base: Annotated[str, OF_PLANNER]
    cache: Annotated[CacheConfig, OF_PLANNER]
    resolved_cache: Annotated[ResolvedCache, OF_PLANNER]
    data: Annotated[DataConfig, OF_PLANNER]
    export: Annotated[ExportConfig, OF_PLANNER]

    @classmethod
    def of(cls, config: RunSections, phase: str = "") -> Self:
        """Return the settings of a run's stage for a phase."""
        end = config.phases.index(config.phase(phase)) + 1
        parts: dict[str, Any] = {"phases": config.phases[:end], "later": config.phases[end:]}
        if config.phase(phase).launch.preset != "auto":
            parts["max_sequence_length"] = None
        return super().of(config).model_copy(update=parts)

    def phase(self, name: str) -> Phase:
        """Return the phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    def cache_size(self, phase: Phase) -> int:
        """Return the number that names a phase's cache, as RunSections.cache_size does."""
        return phase.train.max_length if self.is_text else phase.train.resolution


PlannedRun: TypeAlias = RunSections | LaunchSettings
"""What the planner takes: a run, or the settings of the stage that plans for `launch: auto`."""


class ExportSettings(TrainedPartSettings):
    """The settings of export_weights."""

    export: ExportConfig
    family: str
    max_sequence_length: Annotated[int | None, MAX_SEQUENCE_LENGTH, OF_CACHE]
    long_captions: Annotated[str, OF_CACHE]
    prompt_template: Annotated[str | None, From("data.prompt_template"), OF_CACHE]


class EvaluateSettings(StageSettings):
    """The settings of evaluate."""

    evaluate: EvaluateConfig
    seed: int
    phase: Annotated[str, From("phase.name"), OF_PATHS]
    first_phase: Annotated[str, From("phases.0.name"), OF_WEIGHTS]
    family: str
    is_text: Annotated[bool, OF_FAMILY]
    data: Annotated[DataConfig, OF_DATASET]
    max_sequence_length: Annotated[int | None, MAX_SEQUENCE_LENGTH, OF_CACHE]
    long_captions: Annotated[str, OF_CACHE]
    train: Annotated[TrainConfig, From("phase.train"), OF_WEIGHTS]
    num_cpu_threads_per_process: Annotated[int | None, From(f"phase.{THREADS.path}"), OF_WEIGHTS]


class ReportSettings(StageSettings):
    """The settings of report."""

    run: Annotated[str, OF_EVALUATION]
    family: Annotated[str, OF_EVALUATION]
    is_text: Annotated[bool, OF_EVALUATION]
    base: Annotated[str, OF_EVALUATION]
    revision: Annotated[str | None, OF_EVALUATION]
    data: Annotated[DataConfig, OF_EVALUATION]
    seed: Annotated[int, OF_EVALUATION]
    evaluate: Annotated[EvaluateConfig, OF_EVALUATION]
    max_sequence_length: Annotated[int | None, MAX_SEQUENCE_LENGTH, OF_EVALUATION]
    long_captions: Annotated[str, OF_EVALUATION]
    phases: Annotated[list[Phase], OF_EVALUATION]


class TrainSettings(StageSettings):
    """The settings of train_phase, which reads launch files alone."""


SETTINGS: Mapping[str, type[StageSettings]] = {
    "prepare_dataset": PrepareSettings,
    "build_base": BuildSettings,
    "cache_latents": CacheSettings,
    "import_checkpoint": ImportSettings,
    "render_launch": LaunchSettings,
    "train_phase": TrainSettings,
    "export_weights": ExportSettings,
    "evaluate": EvaluateSettings,
    "report": ReportSettings,
}
"""The settings of stages, by their rules."""


@dataclass(frozen=True)
class SettingsFile:
    """What the file of a stage says, which its rule takes as an input and its command reads.

    It is written before Snakemake plans (zerotrain.graph.currency): the stage reads the
    values of the plan, whatever is edited meanwhile, and no others.

        {"stage": "evaluate", "version": 1, "rebuild": null, "settings": {...}}
    """

    stage: str
    version: int
    settings: dict[str, Any]
    rebuild: str | None = None
    """Since when the plan needs the folder made again, though nothing else may have changed; None
    if a folder of the same recipe is kept."""


def render(stage: str, settings: StageSettings, rebuild: str | None = None) -> str:
    """Return the text of a stage's file; equal settings give equal texts."""
    values = {
        "stage": stage,
        "version": VERSIONS[stage],
        "rebuild": rebuild,
        "settings": settings.model_dump(mode="json", exclude_unset=True),
    }
    return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read_settings(path: Path, stage: str) -> tuple[StageSettings, SettingsFile]:
    """Read the settings of a stage.

    Raises:
        PipelineError: the file is missing, damaged, or of another stage.
    """
    if not path.exists():
        raise PipelineError(f"{path}: no such file with settings of {stage}", hint=AGAIN)
    found = check_type(read_object(path), SettingsFile, path, hint=AGAIN)
    if found.stage != stage:
        raise PipelineError(
            f"{path}: has the settings of {found.stage}, not of {stage}", hint=AGAIN
        )
    kind = SETTINGS[stage]
    return check_type(found.settings, kind, path, hint=AGAIN), found


def read_mark(path: Path) -> str | None:
    """Read since when a stage's folders are to be made again; None if they are not.

    Raises:
        DocumentError: the file is damaged.
    """
    try:
        found = read_object(path)
    except FileNotFoundError:
        return None
    return check_type(found, SettingsFile, path, hint=AGAIN).rebuild


AGAIN = "`snakemake -n` writes it"


def recipe(stage: str, settings: StageSettings) -> Recipe:
    """Return the recipe of a stage, without its inputs."""
    return Recipe(stage, VERSIONS[stage], settings.recorded(), {})
