"""run.yaml: everything a phase's training needs to know, resolved, each value with its source.

Written by render_launch, read by training; training reads no other configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml

Source = Literal["user", "derived", "default"]


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
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    zero3_init: bool = False
    lora: dict[str, Any] | None = None
    """rank, alpha, dropout and target_modules of an adapter; None trains the model itself."""
    frozen_parameters: list[str] = field(default_factory=list)
    optimizer: str
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    """parameters, learning_rate and adam_weight_decay of groups with values of their own."""
    learning_rate: float
    lr_scheduler: str
    lr_warmup_steps: int
    lr_warmup_ratio: float | None = None
    """If given, lr_warmup_steps is this share of lr_scheduler_steps."""
    lr_scheduler_steps: int
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    adam_weight_decay: float
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
        from there on) and a warm-up that is a share of it, nor names, logging and saving, nor where
        activations wait and how the model is built.
        """
        left_out = {
            "run", "phase", "preset", "until_step", "lr_scheduler_steps", "save_every", "keep",
            "log_every", "offload_path", "partition_activations", "cpu_checkpointing",
            "contiguous_memory_optimization", "zero3_init", "allow", "sources",
        }  # fmt: skip
        if self.lr_warmup_ratio is not None:
            left_out.add("lr_warmup_steps")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}


def warmup_share(ratio: float, horizon: int) -> int:
    """A share of a schedule in whole steps, rounded up; 0.07 of 100 are 7, not 8."""
    return math.ceil(Fraction(str(ratio)) * horizon)


def write_run_yaml(phase: ResolvedPhase, path: Path) -> None:
    """Write each value with its source, in the order of the class."""
    document: dict[str, Any] = {}
    for item in fields(phase):
        if item.name == "sources":
            continue
        source, reason = phase.sources.get(item.name, ("default", ""))
        entry: dict[str, Any] = {"value": getattr(phase, item.name), "source": source}
        if reason:
            entry["reason"] = reason
        document[item.name] = entry
    # PyYAML quotes what YAML 1.1 readers take for booleans: mixed_precision is 'no'.
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=200, default_flow_style=None))


def read_run_yaml(path: Path) -> ResolvedPhase:
    """Read what write_run_yaml wrote."""
    document = yaml.safe_load(path.read_text())
    return ResolvedPhase(
        **{name: entry["value"] for name, entry in document.items()},
        sources={n: (e["source"], e.get("reason", "")) for n, e in document.items()},
    )
