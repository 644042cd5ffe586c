"""run.yaml: everything a phase's training needs to know, resolved, each value with its source.

Written by render_launch, read by training; training reads no other configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml

Source = Literal["user", "derived", "default"]

FP16 = {
    "loss_scale": 0.0,
    "initial_scale_power": 16,
    "loss_scale_window": 2000,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
"""fp16's loss scale where nothing else is asked for; the names are DeepSpeed's."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPhase:
    """A phase with nothing left open."""

    run: str
    phase: str
    family: str
    seed: int
    preset: str
    engine: Literal["torch", "deepspeed"]
    zero_stage: int
    offload_optimizer: str
    offload_param: str = "none"
    offload_path: str | None = None
    num_processes: int
    num_cpu_threads_per_process: int
    mixed_precision: Literal["no", "bf16", "fp16"]
    fp16: dict[str, Any] = field(default_factory=FP16.copy)
    """The loss scale of precision fp16; the keys of FP16."""
    start_step: int
    """The global step at which the phase before ends; 0 for the first."""
    until_step: int
    epoch_size: int
    """Samples in an epoch."""
    resolution: int
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    lora: dict[str, Any] | None = None
    """rank, alpha, dropout and target_modules of an adapter; None trains the model itself."""
    frozen_parameters: list[str] = field(default_factory=list)
    optimizer: str
    """A name of zerotrain.optimizers."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """What its class takes beyond the values here."""
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    """parameters, learning_rate and adam_weight_decay of groups with values of their own."""
    learning_rate: float
    lr_scheduler: str
    lr_scheduler_args: dict[str, Any] = field(default_factory=dict)
    """The schedule's arguments but for those that are keys here, as a peak, warm-up and horizon."""
    lr_warmup_steps: int
    lr_warmup_ratio: float | None = None
    """If given, lr_warmup_steps is this share of lr_scheduler_steps."""
    lr_scheduler_steps: int
    adam_beta1: float | None
    adam_beta2: float | None
    adam_epsilon: float | None
    """None where the optimizer is none of Adam's family."""
    adam_weight_decay: float
    """Weight decay of any optimizer, decoupled or not as it has it."""
    max_grad_norm: float
    snr_gamma: float | None
    caption_dropout_probability: float
    save_every: int
    keep: int
    log_every: int
    allow: list[str] = field(default_factory=list)
    """What the switch into this phase may lose."""
    sources: dict[str, tuple[Source, str]] = field(default_factory=dict, compare=False)
    """Where each value comes from, and why where it is derived."""

    def warmup_steps(self, horizon: int) -> int:
        """Steps of warm-up under a horizon, which need not be the one that was resolved here."""
        if self.lr_warmup_ratio is None:
            return self.lr_warmup_steps
        return warmup_share(self.lr_warmup_ratio, horizon)

    def numbers(self) -> dict[str, Any]:
        """The values that the trained numbers depend on: what a fingerprint of progress holds.

        Not `until_step`, nor the horizon of the schedule (a user who changes it means the steps
        from there on) and a warm-up that is a share of it, nor names, logging and saving.
        """
        left_out = {
            "run", "phase", "preset", "until_step", "lr_scheduler_steps", "save_every", "keep",
            "log_every", "offload_path", "allow", "sources",
        }  # fmt: skip
        if self.lr_warmup_ratio is not None:
            left_out.add("lr_warmup_steps")
        if self.mixed_precision != "fp16":
            left_out.add("fp16")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}


def warmup_share(ratio: float, horizon: int) -> int:
    """A share of a schedule in whole steps, rounded up; 0.07 of 100 are 7, not 8."""
    return math.ceil(Fraction(str(ratio)) * horizon)


def explained(phase: ResolvedPhase) -> Iterator[tuple[str, Any, Source, str]]:
    """Name, value, source and reason of each value, in the order of the class.

    A mapping whose keys have sources of their own gives a row for each: `lr_scheduler_args.power`.
    """
    for item in fields(phase):
        value = getattr(phase, item.name)
        if item.name == "sources":
            continue
        if isinstance(value, dict) and any(f"{item.name}.{key}" in phase.sources for key in value):
            rows = [(f"{item.name}.{key}", part) for key, part in value.items()]
        else:
            rows = [(item.name, value)]
        for name, part in rows:
            yield (name, part, *phase.sources.get(name, ("default", "")))


def write_run_yaml(phase: ResolvedPhase, path: Path) -> None:
    """Write each value with its source, in the order of the class."""
    document: dict[str, Any] = {}
    for name, value, source, reason in explained(phase):
        document[name] = {"value": value, "source": source} | ({"reason": reason} if reason else {})
    # PyYAML quotes what YAML 1.1 readers take for booleans: mixed_precision is 'no'.
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=200, default_flow_style=None))


def read_run_yaml(path: Path) -> ResolvedPhase:
    """Read what write_run_yaml wrote."""
    document = yaml.safe_load(path.read_text())
    values: dict[str, Any] = {}
    for name, entry in document.items():
        whole, _, key = name.partition(".")
        if key:
            values.setdefault(whole, {})[key] = entry["value"]
        else:
            values[whole] = entry["value"]
    return ResolvedPhase(
        **values,
        sources={n: (e["source"], e.get("reason", "")) for n, e in document.items()},
    )
