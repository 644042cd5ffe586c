"""A fully resolved phase: its sections, the values derived from them, and the source of each value.

A key of `train` or `launch` is defined only in its section: its roles
(zerotrain.config.section.Role) define its meaning for a training and for run.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

from zerotrain.config.launch import LaunchConfig
from zerotrain.config.section import Role, Section, keys_with
from zerotrain.config.training import ObjectiveConfig, TrainConfig

Source = Literal["user", "derived", "default"]
Settings = dict[str, tuple[Any, Source, str]]
"""Dotted key to value, source and reason."""


def nest_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key in the nested form of a file."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inside = nested
        for name in path:
            inside = inside.setdefault(name, {})
        inside[last] = value
    return nested


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of a nested mapping; {} counts as a leaf."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


FILES = ("accelerate", "deepspeed")
"""Keys whose value is a whole launch file, with a source per key of the file."""
DISPLAY_KEYS = {
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level",
    "zero_optimization.log_trace_cache_warnings",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip
"""DeepSpeed's keys that affect no number."""
EXACT_KEYS = {
    *(f"zero_optimization.{key}" for key in (
        "contiguous_gradients", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size",
        "allgather_partitions", "sub_group_size", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance",
    )),
    *(f"zero_optimization.{target}.{key}" for target in ("offload_optimizer", "offload_param")
      for key in ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu")),
    *DISPLAY_KEYS,
}  # fmt: skip
"""DeepSpeed's keys that may change in the middle of a phase, as after an out-of-memory error: at
most they change the order of sums."""

ORDER = (
    *("run", "phase", "family", "seed", "preset", "engine", "zero_stage", "offload_optimizer"),
    *("offload_param", "bf16_optimizer_states", "offload_path", "num_processes"),
    *("machines", "num_cpu_threads_per_process", "main_process_port", "ddp_timeout", "lock_lease"),
    *("mixed_precision", "fp16", "allow_tf32", "full_determinism", "dynamo_backend"),
    *("dynamo_mode", "find_unused_parameters", "start_step", "until_step", "epoch_size"),
    *("resolution", "max_length", "packing", "global_batch_size", "micro_batch_size"),
    *("gradient_accumulation_steps", "gradient_checkpointing", "partition_activations"),
    *("cpu_checkpointing", "contiguous_memory_optimization", "zero3_init", "lora", "peft"),
    *("base_model_precision", "base_model_exclude_modules", "frozen_parameters"),
    *("trainable_parameters", "optimizer", "optimizer_args", "param_groups", "learning_rate"),
    *("lr_scheduler", "lr_scheduler_args", "lr_warmup_steps", "lr_warmup_ratio"),
    *("lr_scheduler_steps", "adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay"),
    *("no_decay_norm_bias", "max_grad_norm", "grad_clip_method", "nan_action", "objective"),
    *("caption_dropout_probability", "long_captions", "tread_config", "use_ema", "ema_decay"),
    *("ema_update_interval", "ema_device", "validation", "save_every", "keep", "keep_every"),
    *("disk_low_threshold", "log_every", "report_to", "tracker_project_name"),
    *("tracker_run_name", "on_change", "allow"),
)
"""The fixed key order of run.yaml: keys that are not listed follow, then the launch files."""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Values that follow from the configuration, the preset and the data."""

    engine: Literal["torch", "deepspeed"]
    zero_stage: int
    offload_optimizer: str
    offload_param: str = "none"
    """The launch's value, else the preset's."""
    start_step: int
    """The global step at which the previous phase ends; 0 for the first phase."""
    until_step: Annotated[int, Role.UNTRAINED]
    epoch_size: int
    """Samples per epoch."""
    micro_batch_size: Annotated[int, Role.ROUNDING]
    lr_scheduler_steps: Annotated[int, Role.UNTRAINED]
    """The horizon of the schedule."""
    objective: dict[str, Any] = field(default_factory=dict)
    """Definition of the loss: the keys of ObjectiveConfig that the family has."""
    validation: Annotated[dict[str, Any] | None, Role.UNTRAINED, Role.ABSENT_IF_NONE] = None
    """The keys of config.validation, each with a value; None disables it."""
    accelerate: Annotated[dict[str, Any], Role.UNTRAINED] = field(default_factory=dict)
    """Content of accelerate's file, without the path of DeepSpeed's."""
    deepspeed: Annotated[dict[str, Any], Role.UNTRAINED] = field(default_factory=dict)
    """Content of DeepSpeed's file; empty under plain PyTorch."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPhase:
    """Fully resolved phase.

    `train` and `launch` are the validated sections, with a value for every key that the user did
    not set. A key that does not apply to the family or the optimizer is None.
    """

    run: Annotated[str, Role.UNTRAINED]
    phase: Annotated[str, Role.UNTRAINED]
    family: str
    seed: int
    lora: dict[str, Any] | None = None
    """rank, alpha, dropout and target_modules of a LoRA; None: no LoRA."""
    peft: dict[str, Any] | None = None
    """peft_type and arguments of another adapter."""
    base_model_precision: str = "no_change"
    """Precision of an adapter's base: one of quantized_linear.METHODS, or that of its files."""
    base_model_exclude_modules: list[str] = field(default_factory=list)
    """Names of layers that are not quantized; see adapters.is_excluded."""
    frozen_parameters: list[str] = field(default_factory=list)
    trainable_parameters: list[str] = field(default_factory=list)
    allow: Annotated[list[str], Role.UNTRAINED] = field(default_factory=list)
    """What the switch into this phase is allowed to lose."""
    train: TrainConfig
    launch: LaunchConfig
    derived: Derived
    sources: dict[str, tuple[Source, str]] = field(default_factory=dict, compare=False)
    """Source of each value, and the reason if it is derived."""

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], sources: Mapping[str, tuple[Source, str]] | None = None
    ) -> ResolvedPhase:
        """Build a phase from values by key, as in run.yaml; a missing key gets its default.

        Raises:
            TypeError: a key is unknown.
        """
        if unknown := values.keys() - OWNERS.keys():
            raise TypeError(f"unknown keys: {', '.join(sorted(unknown))}")
        own = {key: value for key, value in values.items() if OWNERS[key] == ""}
        derived = {key: value for key, value in values.items() if OWNERS[key] == "derived"}
        return cls(
            **own,
            train=TrainConfig.model_construct(
                **_of_section(TrainConfig, {**values.get("objective", {}), **values})
            ),
            launch=LaunchConfig.model_construct(**_of_section(LaunchConfig, values)),
            derived=Derived(**derived),
            sources=dict(sources or {}),
        )

    def values(self) -> dict[str, Any]:
        """Return every value by its key, in the order of run.yaml."""
        return {
            key: _plain(getattr(getattr(self, owner) if owner else self, key))
            for key, owner in OWNERS.items()
        }

    def with_values(
        self, *, sources: Mapping[str, tuple[Source, str]] | None = None, **values: Any
    ) -> ResolvedPhase:
        """Return the phase with other values of some keys."""
        own_sources = self.sources if sources is None else sources
        return ResolvedPhase.from_values(self.values() | values, own_sources)

    @property
    def processes_per_machine(self) -> int:
        """Number of processes of each machine."""
        return self.launch.num_processes // self.launch.machines

    @property
    def adapter(self) -> dict[str, Any] | None:
        """The trained adapter, from either section; None if the model itself is trained."""
        return self.lora or self.peft

    @property
    def swaps(self) -> bool:
        """Whether the phase swaps anything to a disk."""
        return "nvme" in (self.derived.offload_optimizer, self.derived.offload_param)

    def numbers(self) -> dict[str, Any]:
        """Return the values that determine what the phase trains, by key; each checkpoint records
        them.

        Excluded are the end of the phase, the horizon of the schedule (a user who changes it means
        the steps from there on), a warm-up that is a share of it, and values that only change the
        rounding (`rounding`). DeepSpeed's keys are included if the user has set them, except for
        EXACT_KEYS.
        """
        values = self.values()
        left_out = keys_of(Role.UNTRAINED) | keys_of(Role.ROUNDING)
        left_out |= {k for k in keys_of(Role.IMAGES) | keys_of(Role.TEXT) if values[k] is None}
        if self.train.lr_warmup_ratio is not None:
            left_out |= {"lr_warmup_steps"}
        if self.launch.mixed_precision != "fp16":
            left_out |= {"fp16"}
        if not self.train.use_ema:
            left_out |= {"use_ema", *keys_of(Role.OF_EMA)}
        numbers = {key: value for key, value in values.items() if key not in left_out}
        users = {
            key: value
            for key, value in leaves({"deepspeed": self.derived.deepspeed})
            if self.sources.get(key, ("default", ""))[0] == "user"
            and key.partition(".")[2] not in EXACT_KEYS
        }
        return {**numbers, **({"overrides": users} if users else {})}

    def rounding(self) -> dict[str, Any]:
        """Return the values that only change the rounding of a step, by key or DeepSpeed's key."""
        rounding = keys_of(Role.ROUNDING)
        values = {key: value for key, value in self.values().items() if key in rounding}
        if self.launch.dynamo_backend == "no":
            del values["dynamo_mode"]
        zero = leaves({"deepspeed": self.derived.deepspeed})
        exact = {
            key: value for key, value in zero if key.partition(".")[2] in EXACT_KEYS - DISPLAY_KEYS
        }
        return values | exact

    def explain(self) -> Iterator[tuple[str, Any, Source, str]]:
        """Yield dotted name, value, source and reason of each value, in the order of run.yaml.

        Values that do not apply to the family are omitted. A mapping with a source per key gives a
        row for each: `lr_scheduler_args.power`.
        """
        values = self.values()
        optional = keys_of(Role.ABSENT_IF_NONE) | keys_of(Role.IMAGES) | keys_of(Role.TEXT)
        absent = {key for key in optional if values[key] is None}
        if self.base_model_precision == "no_change":
            absent |= {"base_model_precision", "base_model_exclude_modules"}
        for key, value in values.items():
            if key in absent:
                continue
            rows = [(key, value)]
            if isinstance(value, dict):
                inside = list(leaves({key: value}))
                rows = inside if any(name in self.sources for name, _ in inside) else rows
            for name, part in rows:
                yield (name, part, *self.sources.get(name, ("default", "")))


def _roles() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return each key's attribute of a phase ("": the phase itself), and the key's roles."""
    owners: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for owner, kind in (("", ResolvedPhase), ("derived", Derived)):
        hints = get_type_hints(kind, include_extras=True)
        names = [one.name for one in fields(kind) if one.name not in PARTS]
        owners |= {name: (owner, getattr(hints[name], "__metadata__", ())) for name in names}
    for owner, section in SECTIONS.items():
        left_out = {*keys_with(section, Role.UNRESOLVED), *ObjectiveConfig.model_fields, *owners}
        for key, item in section.model_fields.items():
            if key not in left_out:
                owners[key] = (owner, tuple(item.metadata))
    newer = [key for key in owners if key not in (*ORDER, *FILES)]
    return {key: owners[key] for key in (*ORDER, *newer, *FILES)}


PARTS = ("train", "launch", "derived", "sources")
SECTIONS: dict[str, type[Section]] = {"launch": LaunchConfig, "train": TrainConfig}
ROLES = _roles()
OWNERS = {key: owner for key, (owner, _) in ROLES.items()}
"""The attribute of a phase that has each key, in the order of run.yaml; "" is the phase."""


@cache
def keys_of(role: Role) -> frozenset[str]:
    """Return the keys of a phase that have a role."""
    return frozenset(key for key, (_, roles) in ROLES.items() if role in roles)


def _of_section(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section's keys, which were validated when they were resolved."""
    section_values: dict[str, Any] = dict.fromkeys(
        (*keys_with(section, Role.IMAGES), *keys_with(section, Role.TEXT))
    )
    for key, item in section.model_fields.items():
        if key in values:
            section_values[key] = _inside(item.annotation, values[key])
    return section_values


def _inside(annotation: Any, value: Any) -> Any:
    """Return a value in which mappings become the section that its annotation names."""
    kind = _section_in(annotation)
    if kind and isinstance(value, Mapping):
        return kind(**value)
    if kind and isinstance(value, list):
        return [_inside(kind, one) for one in value]
    return value


@cache
def _section_in(annotation: Any) -> type[Section] | None:
    kinds = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    return next((kind for kind in kinds if issubclass(kind, Section)), None)


def _plain(value: Any) -> Any:
    """Return a value with its sections as mappings."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.model_dump() if isinstance(value, Section) else value


def _defaults() -> dict[str, Any]:
    defaults = {
        one.name: one.default if one.default_factory is MISSING else one.default_factory()
        for kind in (ResolvedPhase, Derived)
        for one in fields(kind)
        if one.name in OWNERS and (one.default, one.default_factory) != (MISSING, MISSING)
    }
    for key, owner in OWNERS.items():
        if owner in SECTIONS:
            field_of = SECTIONS[owner].model_fields[key]
            defaults[key] = _plain(field_of.get_default(call_default_factory=True))
    return defaults


DEFAULTS = _defaults()
"""Default values by key; a key without a default is missing."""
