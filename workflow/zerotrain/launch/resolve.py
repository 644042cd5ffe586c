"""From the configuration and the number of samples to a phase with nothing left open."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Any

from zerotrain import optimizers
from zerotrain.config import RunConfig, TrainConfig
from zerotrain.config.agreement import OF_GRIDS
from zerotrain.config.objective import ObjectiveConfig
from zerotrain.config.training import IMAGE_KEYS, TEXT_KEYS
from zerotrain.errors import PipelineError
from zerotrain.launch.activations import NOTHING_SHARDED, check_activations
from zerotrain.launch.derive import with_files
from zerotrain.launch.lr_schedule import refuse_impossible_schedule, with_own_keys
from zerotrain.launch.preset import Preset, with_own_offload
from zerotrain.launch.resolved import FILES, ResolvedPhase, warmup_share
from zerotrain.launch.settings import Source
from zerotrain.model_sizes import ModelSizes
from zerotrain.optimizer_arguments import read_optimizer_args

MOST_IMAGES, MOST_EXAMPLES = 64, 256
"""Held-out samples that evaluate takes, of text unless it is told otherwise."""
Sources = dict[str, tuple[Source, str]]
EPOCH_OF_IMAGES = "training samples x repeats, from the dataset manifest"
EPOCH_OF_TEXT = "training rows x repeats, from the cache's manifest"


def resolve_phase(
    config: RunConfig,
    name: str,
    preset: Preset,
    epoch_size: int,
    sizes: ModelSizes | None = None,
    begun: tuple[int, int] = (0, 0),
    why: str = "",
) -> ResolvedPhase:
    """Resolve one phase.

    Args:
        config: The run's configuration.
        name: The phase.
        preset: The preset that the phase's launch names.
        epoch_size: Samples in an epoch: the dataset's, or rows of a text family's cache.
        sizes: The model's, which buckets and thresholds of ZeRO are derived from; plain PyTorch
            needs none.
        begun: Steps and samples that the run begins with, where it goes on from elsewhere.
        why: Why the preset was chosen, where the launch leaves the choice to the planner.

    Raises:
        PipelineError: a phase ends at or before its start, a batch cannot be divided, the schedule
            is impossible, the optimizer does not work under the launch, or the launch asks for
            what its stage cannot do.
    """
    if epoch_size < 1:
        raise PipelineError(
            "the dataset has no training samples",
            hint=f"add {'text' if config.is_text else 'images'}, or lower data.holdout",
        )
    phase = config.phase(name)
    train, launch = phase.train, phase.launch
    spans = phase_spans(config, epoch_size, begun)
    start, until = spans[name]
    sources: Sources = {"run": ("user", ""), "phase": ("user", ""), "seed": _source(config, "seed")}
    sources["family"] = _source(config, "family")
    objective = train.objective(config.family)
    own, foreign = (TEXT_KEYS, IMAGE_KEYS) if config.is_text else (IMAGE_KEYS, TEXT_KEYS)
    for key in type(train).model_fields.keys() - {*ObjectiveConfig.model_fields, *foreign}:
        sources[key] = _source(train, key)
    for key in objective:
        sources[f"objective.{key}"] = _source(train, key)
    for key in set(type(launch).model_fields) - {"device_memory", "processes_per_machine", *FILES}:
        sources[key] = _source(launch, key)
    if "num_processes" not in launch.model_fields_set and launch.num_processes > 1:
        sources["num_processes"] = ("derived", "launch.machines x launch.processes_per_machine")
    for key in ("lora", "peft", "frozen_parameters", "trainable_parameters"):
        sources[key] = _source(config, key)
    sources["allow"] = _source(phase, "allow")
    preset = with_own_offload(preset, launch, f"phase {name}")
    validation = _validation(config, name, preset, sources)
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
    sources["epoch_size"] = ("derived", EPOCH_OF_TEXT if config.is_text else EPOCH_OF_IMAGES)
    _refuse_late_save(train, name, config.phases[-1].name, spans)
    train = with_own_keys(train, sources)
    threads = launch.num_cpu_threads_per_process
    if threads is None:
        of_one = launch.num_processes // launch.machines
        threads = max(1, (os.cpu_count() or 1) // of_one)
        sources["num_cpu_threads_per_process"] = (
            "derived",
            f"cores of the machine that rendered / {_count(of_one, 'process')}",
        )
    horizon = train.lr_scheduler_steps
    if horizon is None:
        last = config.phases[-1].name
        horizon = spans[last][1]
        sources["lr_scheduler_steps"] = (
            "derived",
            f"until of the last phase ({last}); training keeps the horizon it began with",
        )
    warmup = train.lr_warmup_steps
    if train.lr_warmup_ratio is not None:
        warmup = warmup_share(train.lr_warmup_ratio, horizon)
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
    resolved = ResolvedPhase(
        run=config.run,
        phase=name,
        family=config.family,
        seed=config.seed,
        preset=preset.name,
        engine=preset.engine,
        zero_stage=preset.zero_stage,
        offload_optimizer=preset.offload_optimizer,
        offload_param=preset.offload_param,
        offload_path=launch.offload_path,
        scratch=launch.scratch,
        num_processes=launch.num_processes,
        machines=launch.machines,
        num_cpu_threads_per_process=threads,
        main_process_port=launch.main_process_port,
        ddp_timeout=launch.ddp_timeout,
        mixed_precision=launch.mixed_precision,
        fp16=launch.fp16.model_dump(),
        allow_tf32=launch.allow_tf32,
        full_determinism=launch.full_determinism,
        dynamo_backend=launch.dynamo_backend,
        dynamo_mode=launch.dynamo_mode,
        find_unused_parameters=launch.find_unused_parameters,
        start_step=start,
        until_step=until,
        epoch_size=epoch_size,
        **{key: getattr(train, key) for key in own},
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.global_batch_size // accumulation // launch.num_processes,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=train.gradient_checkpointing,
        partition_activations=launch.partition_activations,
        cpu_checkpointing=launch.cpu_checkpointing,
        contiguous_memory_optimization=launch.contiguous_memory_optimization,
        zero3_init=launch.zero3_init,
        lora=config.lora_values(),
        peft=config.peft,
        frozen_parameters=list(config.frozen_parameters),
        trainable_parameters=list(config.trainable_parameters),
        param_groups=[
            {
                "parameters": group.parameters,
                "learning_rate": _given(group.learning_rate, train.learning_rate),
                "adam_weight_decay": _given(
                    group.adam_weight_decay,
                    None if train.no_decay_norm_bias else chosen["adam_weight_decay"],
                ),
            }
            for group in train.param_groups
        ],
        learning_rate=train.learning_rate,
        lr_scheduler=train.lr_scheduler,
        lr_scheduler_args=train.lr_scheduler_args,
        lr_warmup_steps=warmup,
        lr_warmup_ratio=train.lr_warmup_ratio,
        lr_scheduler_steps=horizon,
        no_decay_norm_bias=train.no_decay_norm_bias,
        max_grad_norm=train.max_grad_norm,
        nan_action=train.nan_action,
        objective=objective,
        use_ema=train.use_ema,
        ema_decay=train.ema_decay,
        ema_update_interval=train.ema_update_interval,
        ema_device=train.ema_device,
        validation=validation,
        save_every=train.save_every,
        keep=train.keep,
        keep_every=train.keep_every,
        disk_low_threshold=train.disk_low_threshold,
        log_every=train.log_every,
        report_to=train.report_to,
        tracker_project_name=train.tracker_project_name,
        tracker_run_name=train.tracker_run_name,
        allow=list(phase.allow),
        sources=sources,
        **chosen,
    )
    refuse_impossible_schedule(resolved)
    return with_files(resolved, launch, sizes)


def _validation(
    config: RunConfig, name: str, preset: Preset, sources: Sources
) -> dict[str, Any] | None:
    """The phase's validation with its defaults filled in, which depend on other keys."""
    phase = config.phase(name)
    if (section := phase.validation) is None:
        return None
    found = section.model_dump()
    for key in found:
        sources[f"validation.{key}"] = _source(section, key)
    use_ema = str(phase.train.use_ema).lower()
    metric, why = "val_loss_ema" if phase.train.use_ema else "val_loss", f"use_ema {use_ema}"
    if "nvme" in (preset.offload_optimizer, preset.offload_param):
        metric, why = "val_loss", "averaged weights of what swaps to a disk are not measured"
        if found["metric_for_best_model"] == "val_loss_ema":
            raise PipelineError(
                f"phase {name}: validation.metric_for_best_model: val_loss_ema, but {why}",
                hint="remove it: val_loss is the default here",
            )
    most = MOST_EXAMPLES if config.is_text else MOST_IMAGES
    derived = {"max_samples": (most, "as evaluate takes"), "metric_for_best_model": (metric, why)}
    for key, (value, reason) in derived.items():
        if found[key] is None:
            found[key] = value
            sources[f"validation.{key}"] = ("derived", reason)
    left_out = OF_GRIDS if config.is_text or not section.prompts else ()
    return {key: value for key, value in found.items() if key not in left_out}


def _optimizer(name: str, train: TrainConfig, preset: Preset, sources: Sources) -> dict[str, Any]:
    """optimizer, optimizer_args and the adam_ values of a phase, which are None without meaning."""
    found, reason = optimizers.find(train.optimizer)
    arguments, moved = read_optimizer_args(
        found, train.optimizer_args, train.optimizer_keys_given()
    )
    refused, hint = optimizers.refusal(
        found.name, arguments, engine=preset.engine, offload_optimizer=preset.offload_optimizer
    )
    if refused:
        raise PipelineError(f"phase {name}: {refused} (preset {preset.name})", hint=hint)
    if reason:
        sources["optimizer"] = ("derived", reason)
    chosen: dict[str, Any] = {"optimizer": found.name, "optimizer_args": arguments}
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        chosen[key] = moved.get(key, getattr(train, key)) if found.adam_keys else None
    chosen["adam_weight_decay"] = train.adam_weight_decay
    if "adam_weight_decay" not in train.model_fields_set:
        chosen["adam_weight_decay"] = found.weight_decay or 0.0
        if found.name != "adamw":
            sources["adam_weight_decay"] = ("derived", f"the default of {found.title}")
    for key, value in moved.items():
        chosen[key] = value
        sources[key] = ("user", "optimizer_args")
    return chosen


def _refuse_late_save(
    train: TrainConfig, name: str, last: str, spans: dict[str, tuple[int, int]]
) -> None:
    """Refuse an interval of the user's that no step of the run reaches."""
    each, end = train.save_every, spans[last][1]
    if "save_every" in train.model_fields_set and isinstance(each, int) and each > end:
        raise PipelineError(
            f"phase {name}: save_every {each}, but the run ends at step {end} (until of {last}): "
            "nothing would be saved before the end",
            hint=f"give at most {end}, or a time such as `save_every: 30 min`",
        )


def _given(value: float | None, default: float | None) -> float | None:
    return default if value is None else value


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("s") else "s")
    return f"{number} {what if number == 1 else plural}"


def phase_spans(
    config: RunConfig, epoch_size: int, begun: tuple[int, int] = (0, 0)
) -> dict[str, tuple[int, int]]:
    """First and last global step of each phase, as half-open ranges.

    "N epochs" and "N samples" count from the start of the run, so the batch sizes of the phases
    before enter.

    Raises:
        PipelineError: a phase that ends at or before its start.
    """
    spans: dict[str, tuple[int, int]] = {}
    step, samples = begun
    for phase in config.phases:
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


def _source(section: RunConfig | object, key: str) -> tuple[Source, str]:
    given: set[str] = getattr(section, "model_fields_set", set())
    return ("user", "") if key in given else ("default", "")
