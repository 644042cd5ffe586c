"""Everything a phase's training needs to know, resolved, each value with its source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal

from zerotrain.launch.settings import Source, leaves

FILES = ("accelerate", "deepspeed")
"""Fields that hold a whole launch file, whose values have sources of their own."""
MEMORY_KEYS = (
    "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "zero3_init",
    "ema_device",
)  # fmt: skip
"""What decides where activations and averages wait and how the model is built: its numbers are the
same."""
TRACKER_KEYS = ("report_to", "tracker_project_name", "tracker_run_name")
EXACT_KEYS = {
    *(f"zero_optimization.{key}" for key in (
        "contiguous_gradients", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size",
        "allgather_partitions", "sub_group_size", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save", "log_trace_cache_warnings",
    )),
    *(f"zero_optimization.{target}.{key}" for target in ("offload_optimizer", "offload_param")
      for key in ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu")),
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level",
}  # fmt: skip
"""DeepSpeed's keys that may change in the middle of a phase, as after an out of memory."""

OF_ONE_MODALITY = ("resolution", "caption_dropout_probability", "max_length", "packing")
"""Keys that images or text alone have; training must not depend on the configuration's modules."""

YOUNGER = {
    "allow_tf32": False, "full_determinism": True, "dynamo_backend": "no",
    "no_decay_norm_bias": False,
}  # fmt: skip
"""Keys that are no part of the numbers at these values: what was trained before there were any goes
on."""

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
    scratch: str | None = None
    """Where each machine copies the cache to; None: it is read where it is."""
    num_processes: int
    """Of all machines together."""
    machines: int = 1
    """Machines of a cluster's job; elsewhere the one there is has all processes."""
    num_cpu_threads_per_process: int
    main_process_port: int | None = None
    """Port on which the processes meet; None: one that is free at the start."""
    ddp_timeout: int = 1800
    """Seconds that a process waits for the others, and that nothing may move."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    fp16: dict[str, Any] = field(default_factory=FP16.copy)
    """The loss scale of precision fp16; the keys of FP16."""
    allow_tf32: bool = False
    full_determinism: bool = True
    dynamo_backend: str = "no"
    dynamo_mode: str = "default"
    """How torch.compile compiles the model; `no`: not at all."""
    find_unused_parameters: bool = False
    start_step: int
    """The global step at which the phase before ends; 0 for the first."""
    until_step: int
    epoch_size: int
    """Samples in an epoch."""
    resolution: int | None = None
    max_length: int | None = None
    packing: bool | None = None
    """Those of images are None where the family is of text, and the other way round."""
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
    peft: dict[str, Any] | None = None
    """peft_type of another adapter, and what the user says of it."""
    frozen_parameters: list[str] = field(default_factory=list)
    trainable_parameters: list[str] = field(default_factory=list)
    optimizer: str
    """A name of zerotrain.optimizers."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """What its class takes beyond the values here."""
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    """parameters, learning_rate and adam_weight_decay of groups with values of their own; a decay
    of None is the phase's, and none of vectors."""
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
    no_decay_norm_bias: bool = False
    """Whether vectors are spared weight decay: biases and the weights of norms."""
    max_grad_norm: float
    nan_action: str = "stop"
    """What follows a loss or a gradient that is not a finite number: stop or skip."""
    objective: dict[str, Any] = field(default_factory=dict)
    """What the loss is: the keys of config.objective that the family has."""
    caption_dropout_probability: float | None = None
    use_ema: bool = False
    ema_decay: float = 0.9999
    ema_update_interval: int = 1
    ema_device: str = "accelerator"
    """The moving average of the weights."""
    validation: dict[str, Any] | None = None
    """The keys of config.validation, none left open; None where nothing is measured meanwhile."""
    save_every: int | str
    """Steps, or a time as zerotrain.save_interval has it: "30 min"."""
    keep: int
    keep_every: int | None = None
    disk_low_threshold: int | None = None
    """Bytes; None is no threshold."""
    log_every: int
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Names of zerotrain.tracker_names, or `all`; none where it is empty."""
    tracker_project_name: str | None = None
    tracker_run_name: str | None = None
    allow: list[str] = field(default_factory=list)
    """What the switch into this phase may lose."""
    accelerate: dict[str, Any] = field(default_factory=dict)
    """accelerate's file, without the place of DeepSpeed's."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's file; empty under plain PyTorch."""
    sources: dict[str, tuple[Source, str]] = field(default_factory=dict, compare=False)
    """Where each value comes from, and why where it is derived."""

    @property
    def processes_per_machine(self) -> int:
        """Processes of each machine, where there are so many machines."""
        return self.num_processes // self.machines

    @property
    def adapter(self) -> dict[str, Any] | None:
        """The adapter that is trained, by either section; None where the model itself is."""
        return self.lora or self.peft

    def warmup_steps(self, horizon: int) -> int:
        """Steps of warm-up under a horizon, which need not be the one that was resolved here."""
        if self.lr_warmup_ratio is None:
            return self.lr_warmup_steps
        return warmup_share(self.lr_warmup_ratio, horizon)

    def numbers(self) -> dict[str, Any]:
        """The values that the trained numbers depend on: what a fingerprint of progress holds.

        Not `until_step`, nor the horizon of the schedule (a user who changes it means the steps
        from there on) and a warm-up that is a share of it, nor what follows a loss that is no
        number (a user who changes it means the next one), nor names, logging and saving, nor what
        only decides where tensors lie and how they travel. Of DeepSpeed's and accelerate's keys,
        those that the user has set.
        """
        left_out = {
            "run", "phase", "preset", "until_step", "lr_scheduler_steps", "save_every", "keep",
            "keep_every", "disk_low_threshold", "log_every", "offload_path", "scratch", "allow",
            "sources", "machines", "main_process_port", "ddp_timeout", "accelerate", "deepspeed",
            "find_unused_parameters", "nan_action", "validation", *MEMORY_KEYS, *TRACKER_KEYS,
        }  # fmt: skip
        if self.lr_warmup_ratio is not None:
            left_out.add("lr_warmup_steps")
        if self.mixed_precision != "fp16":
            left_out.add("fp16")
        if not self.use_ema:
            left_out |= {"use_ema", "ema_decay", "ema_update_interval"}
        left_out.update(key for key, value in YOUNGER.items() if getattr(self, key) == value)
        if self.dynamo_backend == "no":
            left_out.add("dynamo_mode")
        left_out.update(name for name in OF_ONE_MODALITY if getattr(self, name) is None)
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        users = {
            key: value
            for key, value in leaves({"deepspeed": self.deepspeed})
            if self.sources.get(key, ("default", ""))[0] == "user"
            and key.partition(".")[2] not in EXACT_KEYS
        }
        return {**found, **({"overrides": users} if users else {})}


def warmup_share(ratio: float, horizon: int) -> int:
    """A share of a schedule in whole steps, rounded up; 0.07 of 100 are 7, not 8."""
    return math.ceil(Fraction(str(ratio)) * horizon)


def explained(phase: ResolvedPhase) -> Iterator[tuple[str, Any, Source, str]]:
    """Dotted name, value, source and reason of each value, in the order of the class.

    What the family has no such thing of is left out.
    A mapping whose keys have sources of their own gives a row for each: `lr_scheduler_args.power`.
    """
    for item in fields(phase):
        value = getattr(phase, item.name)
        absent = value is None and item.name in (*OF_ONE_MODALITY, "validation")
        if item.name == "sources" or absent:
            continue
        rows = [(item.name, value)]
        if isinstance(value, dict):
            inside = list(leaves({item.name: value}))
            rows = inside if any(name in phase.sources for name, _ in inside) else rows
        for name, part in rows:
            yield (name, part, *phase.sources.get(name, ("default", "")))
