"""From the configuration and the number of samples to a phase with nothing left open."""

from __future__ import annotations

import math
import os
from fractions import Fraction

from zerotrain.config import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.preset import Preset
from zerotrain.launch.resolved import ResolvedPhase, Source, warmup_share

Sources = dict[str, tuple[Source, str]]


def resolve_phase(config: RunConfig, name: str, preset: Preset, epoch_size: int) -> ResolvedPhase:
    """Resolve one phase.

    Args:
        config: The run's configuration.
        name: The phase.
        preset: The preset that the phase's launch names.
        epoch_size: Samples in an epoch, from the dataset's manifest.

    Raises:
        PipelineError: a phase ends at or before its start, a batch cannot be divided, or the
            warm-up is longer than the schedule.
    """
    if epoch_size < 1:
        raise PipelineError(
            "the dataset has no training samples",
            hint="add images, or lower data.holdout",
        )
    phase = config.phase(name)
    train, launch = phase.train, phase.launch
    spans = phase_spans(config, epoch_size)
    start, until = spans[name]
    sources: Sources = {"run": ("user", ""), "phase": ("user", ""), "seed": _source(config, "seed")}
    sources["family"] = _source(config, "family")
    for key in type(train).model_fields:
        sources[key] = _source(train, key)
    for key in type(launch).model_fields:
        sources[key] = _source(launch, key)
    for key in ("engine", "zero_stage", "offload_optimizer"):
        sources[key] = ("derived", f"preset {preset.name}")
    sources["num_processes"] = ("default", "one process")
    sources["start_step"] = ("derived", "until of the phase before" if start else "first phase")
    sources["until_step"] = ("user", f"until: {phase.until}")
    sources["epoch_size"] = ("derived", "training samples x repeats, from the dataset manifest")
    threads = launch.num_cpu_threads_per_process
    if threads is None:
        threads = os.cpu_count() or 1
        sources["num_cpu_threads_per_process"] = ("derived", "cores of the machine that rendered")
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
    if warmup > horizon:
        raise PipelineError(
            f"phase {name}: {warmup} steps of warm-up, but the schedule has {horizon}",
            hint="lower lr_warmup_steps or raise lr_scheduler_steps",
        )
    accumulation = train.gradient_accumulation_steps
    sources["micro_batch_size"] = (
        "derived",
        f"global batch {train.global_batch_size} / {accumulation} accumulations / 1 process",
    )
    return ResolvedPhase(
        run=config.run,
        phase=name,
        family=config.family,
        seed=config.seed,
        preset=preset.name,
        engine=preset.engine,
        zero_stage=preset.zero_stage,
        offload_optimizer=preset.offload_optimizer,
        num_processes=1,
        num_cpu_threads_per_process=threads,
        mixed_precision=launch.mixed_precision,
        start_step=start,
        until_step=until,
        epoch_size=epoch_size,
        resolution=train.resolution,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.global_batch_size // accumulation,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=train.gradient_checkpointing,
        optimizer=train.optimizer,
        learning_rate=train.learning_rate,
        lr_scheduler=train.lr_scheduler,
        lr_warmup_steps=warmup,
        lr_warmup_ratio=train.lr_warmup_ratio,
        lr_scheduler_steps=horizon,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        adam_weight_decay=train.adam_weight_decay,
        max_grad_norm=train.max_grad_norm,
        snr_gamma=train.snr_gamma,
        caption_dropout_probability=train.caption_dropout_probability,
        save_every=train.save_every,
        keep=train.keep,
        log_every=train.log_every,
        sources=sources,
    )


def phase_spans(config: RunConfig, epoch_size: int) -> dict[str, tuple[int, int]]:
    """First and last global step of each phase, as half-open ranges.

    "N epochs" and "N samples" count from the start of the run, so the batch sizes of the phases
    before enter.

    Raises:
        PipelineError: a phase that ends at or before its start.
    """
    spans: dict[str, tuple[int, int]] = {}
    step = samples = 0
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
