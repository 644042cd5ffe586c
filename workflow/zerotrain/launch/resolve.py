"""Resolution of the configuration and the number of samples to a complete phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from zerotrain.config import optimizers
from zerotrain.config.launch import LaunchConfig
from zerotrain.config.models import Phase
from zerotrain.config.optimizer_arguments import read_optimizer_args
from zerotrain.config.run import OF_GRIDS
from zerotrain.config.section import Role, keys_with
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.derive import with_files
from zerotrain.launch.preset import Preset, with_own_offload
from zerotrain.launch.resolved import FILES, OWNERS, ResolvedPhase, Source
from zerotrain.launch.schedules import check_schedule, warmup_steps, with_own_keys
from zerotrain.models.sizes import ModelSizes

NOTHING_SHARDED = (
    "DeepSpeed shards among the processes of model parallelism, of which there is one here: "
    "nothing is sharded"
)
MOST_IMAGES, MOST_EXAMPLES = 64, 256
"""Default numbers of held-out samples that evaluate uses, for images and for text."""
OF_MODEL = (
    *("lora", "peft", "frozen_parameters", "trainable_parameters"),
    *("base_model_precision", "base_model_exclude_modules"),
)
"""Keys of a run that determine the trained parameters."""
Sources = dict[str, tuple[Source, str]]
EPOCH_OF_IMAGES = "training samples x repeats, from the dataset manifest"
EPOCH_OF_TEXT = "training rows x repeats, from the cache's manifest"


def resolve_phase(
    settings: LaunchSettings,
    preset: Preset,
    epoch_size: int,
    sizes: ModelSizes | None = None,
    origin: tuple[int, int] = (0, 0),
    why: str = "",
) -> ResolvedPhase:
    """Resolve the last of the phases in the settings.

    Args:
        settings: The settings of render_launch.
        preset: The preset of the phase's launch.
        epoch_size: Samples per epoch: of the dataset, or rows of a text family's cache.
        sizes: The model's sizes, from which ZeRO's buckets and thresholds are derived; not needed
            for plain PyTorch.
        origin: Steps and samples at the start of the run, if it continues another training.
        why: The reason for the preset, if the planner chose it.

    Raises:
        PipelineError: a phase ends at or before its start, a batch cannot be divided, the schedule
            is impossible, the optimizer does not work under the launch, or the launch needs
            something that its stage cannot do.
    """
    if epoch_size < 1:
        raise PipelineError(
            "the dataset has no training samples",
            hint=f"add {'text' if settings.is_text else 'images'}, or lower data.holdout",
        )
    phase = settings.phases[-1]
    name, train, launch = phase.name, phase.train, phase.launch
    every = [*settings.phases, *settings.later]
    spans = phase_spans(every, epoch_size, origin)
    start, until = spans[name]
    sources: Sources = {"run": ("user", ""), "phase": ("user", "")}
    for key in ("seed", "family", *OF_MODEL):
        sources[key] = ("user" if key in settings.given else "default", "")
    objective = train.objective(settings.family)
    for section in (train, launch):
        sources |= {key: _source(section, key) for key in _keys(settings, section)}
    for key in objective:
        sources[f"objective.{key}"] = _source(train, key)
    if "num_processes" not in launch.model_fields_set and launch.num_processes > 1:
        sources["num_processes"] = ("derived", "launch.machines x launch.processes_per_machine")
    sources["allow"] = _source(phase, "allow")
    preset = with_own_offload(preset, launch, f"phase {name}")
    validation = _validation(settings, preset, sources)
    check_activations(name, launch, preset, train.gradient_checkpointing)
    if preset.engine == "auto":
        raise ValueError("a preset is chosen before a phase is resolved")
    if launch.partition_activations:
        sources["partition_activations"] = ("user", NOTHING_SHARDED)
    for key in ("engine", "zero_stage", "offload_optimizer", "offload_param"):
        if getattr(launch, key, None) is None:
            sources[key] = ("derived", f"preset {preset.name}")
    if why:
        sources["preset"] = ("derived", why)
    sources["start_step"] = ("derived", "until of the phase before" if start else "first phase")
    sources["until_step"] = ("user", f"until: {phase.until}")
    sources["epoch_size"] = ("derived", EPOCH_OF_TEXT if settings.is_text else EPOCH_OF_IMAGES)
    _check_save_interval(train, name, every[-1].name, spans)
    train = with_own_keys(train, sources)
    if launch.num_cpu_threads_per_process is None:
        of_one = launch.num_processes // launch.machines
        sources["num_cpu_threads_per_process"] = (
            "default",
            f"cores of the machine that trains / {_count(of_one, 'process')}",
        )
    horizon = train.lr_scheduler_steps
    if horizon is None:
        last = every[-1].name
        horizon = spans[last][1]
        sources["lr_scheduler_steps"] = (
            "derived",
            f"until of the last phase ({last}); training keeps the horizon it began with",
        )
    if train.lr_warmup_ratio is not None:
        sources["lr_warmup_steps"] = (
            "derived",
            f"lr_warmup_ratio {train.lr_warmup_ratio:g} of {horizon} steps",
        )
    chosen = _optimizer(name, train, preset, sources)
    accumulation = train.gradient_accumulation_steps
    sources["micro_batch_size"] = (
        "derived",
        f"global batch {train.global_batch_size} / {_count(accumulation, 'accumulation')} / "
        f"{_count(launch.num_processes, 'process')}",
    )
    values = {
        **{key: getattr(settings, key) for key in ("run", "family", "seed", *OF_MODEL)},
        **{key: getattr(train, key) for key in _keys(settings, train)},
        **{key: getattr(launch, key) for key in _keys(settings, launch)},
        "phase": name,
        "lora": settings.lora.values() if settings.lora else None,
        "allow": phase.allow,
        "preset": preset.name,
        "engine": preset.engine,
        "zero_stage": preset.zero_stage,
        "offload_optimizer": preset.offload_optimizer,
        "offload_param": preset.offload_param,
        "start_step": start,
        "until_step": until,
        "epoch_size": epoch_size,
        "micro_batch_size": train.global_batch_size // accumulation // launch.num_processes,
        "lr_warmup_steps": warmup_steps(train, horizon),
        "lr_scheduler_steps": horizon,
        "objective": objective,
        "validation": validation,
        **chosen,
        "param_groups": [
            {
                "parameters": group.parameters,
                "learning_rate": _value_or_default(group.learning_rate, train.learning_rate),
                "adam_weight_decay": _value_or_default(
                    group.adam_weight_decay,
                    None if train.no_decay_norm_bias else chosen["adam_weight_decay"],
                ),
            }
            for group in train.param_groups
        ],
    }
    resolved = ResolvedPhase.from_values(values, sources)
    check_schedule(resolved)
    _check_bf16_states(resolved)
    _check_partitioned_codes(resolved)
    return with_files(resolved, launch, sizes)


def _keys(settings: LaunchSettings, section: TrainConfig | LaunchConfig) -> set[str]:
    """Return the keys of a section that a training reads and that apply to the family."""
    others = keys_with(type(section), Role.IMAGES if settings.is_text else Role.TEXT)
    return (type(section).model_fields.keys() & OWNERS.keys()) - {*others, *FILES}


def _validation(
    settings: LaunchSettings, preset: Preset, sources: Sources
) -> dict[str, Any] | None:
    """Return the phase's validation with its defaults, which depend on other keys."""
    phase = settings.phases[-1]
    if (section := phase.validation) is None:
        return None
    values = section.model_dump()
    for key in values:
        sources[f"validation.{key}"] = _source(section, key)
    use_ema = str(phase.train.use_ema).lower()
    metric, why = "val_loss_ema" if phase.train.use_ema else "val_loss", f"use_ema {use_ema}"
    if "nvme" in (preset.offload_optimizer, preset.offload_param):
        metric, why = "val_loss", "averaged weights of what swaps to a disk are not measured"
        if values["metric_for_best_model"] == "val_loss_ema":
            raise PipelineError(
                f"phase {phase.name}: validation.metric_for_best_model: val_loss_ema, but {why}",
                hint="remove it: val_loss is the default here",
            )
    most = MOST_EXAMPLES if settings.is_text else MOST_IMAGES
    derived = {"max_samples": (most, "as evaluate takes"), "metric_for_best_model": (metric, why)}
    for key, (value, reason) in derived.items():
        if values[key] is None:
            values[key] = value
            sources[f"validation.{key}"] = ("derived", reason)
    left_out = OF_GRIDS if settings.is_text or not section.prompts else ()
    return {key: value for key, value in values.items() if key not in left_out}


def _optimizer(name: str, train: TrainConfig, preset: Preset, sources: Sources) -> dict[str, Any]:
    """Return optimizer, optimizer_args and adam_ values of a phase; None if not applicable."""
    table, reason = optimizers.find(train.optimizer)
    arguments, moved = read_optimizer_args(
        table, train.optimizer_args, train.optimizer_keys_given()
    )
    refused, hint = optimizers.refusal(
        table.name, arguments, engine=preset.engine, offload_optimizer=preset.offload_optimizer
    )
    if refused:
        raise PipelineError(f"phase {name}: {refused} (preset {preset.name})", hint=hint)
    if reason:
        sources["optimizer"] = ("derived", reason)
    chosen: dict[str, Any] = {"optimizer": table.name, "optimizer_args": arguments}
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        chosen[key] = moved.get(key, getattr(train, key)) if table.adam_keys else None
    chosen["adam_weight_decay"] = train.adam_weight_decay
    if "adam_weight_decay" not in train.model_fields_set:
        chosen["adam_weight_decay"] = table.weight_decay or 0.0
        if table.name != "adamw":
            sources["adam_weight_decay"] = ("derived", f"the default of {table.title}")
    for key, value in moved.items():
        chosen[key] = value
        sources[key] = ("user", "optimizer_args")
    return chosen


def _check_bf16_states(phase: ResolvedPhase) -> None:
    """Refuse bf16 moments if no optimizer here supports them."""
    if not phase.launch.bf16_optimizer_states:
        return
    if phase.derived.offload_optimizer != "cpu":
        raise PipelineError(
            f"phase {phase.phase}: launch.bf16_optimizer_states: true, but preset "
            f"{phase.launch.preset} "
            f"has offload_optimizer {phase.derived.offload_optimizer}: it saves host memory, "
            "where the optimizer is offloaded to",
            hint="choose zero2_offload or zero3_offload, or remove it",
        )
    if not optimizers.is_plain_adam(phase.train.optimizer, phase.train.optimizer_args):
        raise PipelineError(
            f"phase {phase.phase}: launch.bf16_optimizer_states: true, but optimizer "
            f"{phase.train.optimizer} keeps its states in float32",
            hint="choose adamw or adam without optimizer_args, or remove it",
        )


def _check_partitioned_codes(phase: ResolvedPhase) -> None:
    """Refuse quantized weights under stage 3, which only partitions floating-point parameters."""
    if phase.base_model_precision != "no_change" and phase.derived.zero_stage == 3:
        raise PipelineError(
            f"phase {phase.phase}: base_model_precision: {phase.base_model_precision}, but preset "
            f"{phase.launch.preset} is ZeRO 3, which would keep the codes whole in every process",
            hint="choose torch, zero1, zero2 or zero2_offload, or remove base_model_precision",
        )


def _check_save_interval(
    train: TrainConfig, name: str, last: str, spans: dict[str, tuple[int, int]]
) -> None:
    """Refuse a user's interval that is longer than the run."""
    each, end = train.save_every, spans[last][1]
    if "save_every" in train.model_fields_set and isinstance(each, int) and each > end:
        raise PipelineError(
            f"phase {name}: save_every {each}, but the run ends at step {end} (until of {last}): "
            "nothing would be saved before the end",
            hint=f"give at most {end}, or a time such as `save_every: 30 min`",
        )


def _value_or_default(value: float | None, default: float | None) -> float | None:
    return default if value is None else value


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("s") else "s")
    return f"{number} {what if number == 1 else plural}"


def phase_spans(
    phases: Sequence[Phase], epoch_size: int, origin: tuple[int, int] = (0, 0)
) -> dict[str, tuple[int, int]]:
    """Return the first and last global step of each phase, as half-open ranges.

    "N epochs" and "N samples" count from the start of the run, so they depend on the batch sizes of
    the previous phases.

    Raises:
        PipelineError: a phase ends at or before its start.
    """
    spans: dict[str, tuple[int, int]] = {}
    step, samples = origin
    for phase in phases:
        amount, unit = phase.until.split()
        batch = phase.train.global_batch_size
        if unit == "steps":
            until = int(amount)
        else:
            per_unit = epoch_size if unit == "epochs" else 1
            until = step + math.ceil((Fraction(amount) * per_unit - samples) / batch)
        if until <= step:
            raise PipelineError(
                f"phase {phase.name}: until {phase.until} is step {until}, but the phase begins at "
                f"step {step}",
                hint="`until` counts from the start of the run; give a later end",
            )
        spans[phase.name] = (step, until)
        samples += (until - step) * batch
        step = until
    return spans


def _source(section: object, key: str) -> tuple[Source, str]:
    given: set[str] = getattr(section, "model_fields_set", set())
    return ("user", "") if key in given else ("default", "")


def check_activations(
    phase: str, launch: LaunchConfig, preset: Preset, gradient_checkpointing: bool
) -> None:
    """Refuse settings without an effect or with an unintended one.

    Raises:
        PipelineError: a key of activation_checkpointing without gradient_checkpointing or without
            DeepSpeed, contiguous_memory_optimization, or zero3_init at another stage.
    """
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        if getattr(launch, key) and not gradient_checkpointing:
            raise PipelineError(
                f"phase {phase}: launch.{key} is about what gradient checkpointing keeps, but "
                "train.gradient_checkpointing is false",
                hint=f"set train.gradient_checkpointing: true, or remove launch.{key}",
            )
    if launch.contiguous_memory_optimization:
        raise PipelineError(
            f"phase {phase}: launch.contiguous_memory_optimization joins shards of "
            f"partition_activations that are all of one size. {NOTHING_SHARDED}, and blocks differ "
            "in size",
            hint="remove it; against fragmented GPU memory set the environment variable "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    if launch.partition_activations and preset.engine != "deepspeed":
        raise PipelineError(
            f"phase {phase}: launch.partition_activations is DeepSpeed's, but preset "
            f"{preset.name} is plain PyTorch",
            hint="remove it; cpu_checkpointing saves memory under every preset",
        )
    if launch.zero3_init and preset.zero_stage != 3:
        raise PipelineError(
            f"phase {phase}: launch.zero3_init builds the model in parts, but under preset "
            f"{preset.name} every process holds all of it",
            hint="remove it, or choose a preset of ZeRO stage 3",
        )
