"""Values of the two launch files, derived from the resolved phase and the model."""

from __future__ import annotations

from dataclasses import replace

from zerotrain.config.launch import LaunchConfig
from zerotrain.config.optimizers import is_plain_adam
from zerotrain.errors import PipelineError
from zerotrain.launch.overrides import overlay
from zerotrain.launch.resolved import ResolvedPhase, Settings, nest_keys
from zerotrain.launch.zero import zero_optimization
from zerotrain.models.sizes import ModelSizes

COMMUNICATION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
NEVER = 1_000_000_000


def with_files(
    phase: ResolvedPhase, launch: LaunchConfig, sizes: ModelSizes | None
) -> ResolvedPhase:
    """Return the phase with the content of its two launch files, each value with its source.

    Raises:
        PipelineError: the launch sets a key that it must not set.
    """
    files: dict[str, Settings] = {"accelerate": accelerate_settings(phase), "deepspeed": {}}
    if phase.derived.engine == "deepspeed":
        if sizes is None:
            raise ValueError("ZeRO's buckets are derived from the model's sizes")
        files["deepspeed"] = deepspeed_settings(phase, sizes)
    elif launch.deepspeed:
        raise PipelineError(
            f"phase {phase.phase}: launch.deepspeed sets {', '.join(launch.deepspeed)}, but preset "
            f"{phase.launch.preset} is plain PyTorch",
            hint="remove launch.deepspeed, or choose a ZeRO preset",
        )
    values, sources = phase.values(), dict(phase.sources)
    for program, settings in files.items():
        entries = overlay(settings, program, getattr(launch, program), phase.phase)
        values[program] = nest_keys({key: entry[0] for key, entry in entries.items()})
        sources |= {f"{program}.{key}": entry[1:] for key, entry in entries.items()}
    resolved = ResolvedPhase.from_values(values, sources)
    names = [name for name, *_ in resolved.explain() if name in sources]
    return replace(resolved, sources={name: sources[name] for name in names})


def accelerate_settings(phase: ResolvedPhase) -> Settings:
    """Return accelerate's file in the form of `accelerate config`; ZeRO is in DeepSpeed's file."""
    several = phase.launch.num_processes > 1
    kind = "MULTI_GPU" if several else "NO"
    settings: Settings = {
        "compute_environment": ("LOCAL_MACHINE", "default", ""),
        "debug": (False, "default", ""),
        "distributed_type": (
            "DEEPSPEED" if phase.derived.engine == "deepspeed" else kind,
            "derived",
            f"preset {phase.launch.preset}, {phase.launch.num_processes} processes",
        ),
        "downcast_bf16": ("no", "default", ""),
        "enable_cpu_affinity": (False, "default", ""),
        "machine_rank": (0, "default", ""),
        "main_training_function": ("main", "default", ""),
        "num_machines": (phase.launch.machines, "derived", "launch.machines"),
        "num_processes": (phase.launch.num_processes, "derived", "launch.num_processes"),
        "rdzv_backend": ("static", "default", ""),
        "same_network": (True, "default", ""),
        "use_cpu": (False, "default", "a GPU is used where there is one"),
    }
    if phase.derived.engine == "deepspeed":
        settings["deepspeed_config.zero3_init_flag"] = (
            phase.launch.zero3_init,
            "derived",
            "launch.zero3_init",
        )
        if phase.launch.machines > 1:
            settings["deepspeed_config.deepspeed_multinode_launcher"] = (
                "standard",
                "derived",
                "torchrun on each machine, as with one; DeepSpeed's own would go there by ssh",
            )
    else:
        settings["mixed_precision"] = (
            phase.launch.mixed_precision,
            "derived",
            "launch.mixed_precision",
        )
    return settings


def deepspeed_settings(phase: ResolvedPhase, sizes: ModelSizes) -> Settings:
    """Return the config of deepspeed.initialize; the program itself sets optimizer and schedule.

    gradient_clipping is always written: DeepSpeed's default is 1.0, and 0.0 disables it.
    """
    precision = phase.launch.mixed_precision
    zero = zero_optimization(
        phase.derived.zero_stage,
        phase.derived.offload_optimizer,
        phase.derived.offload_param,
        phase.launch.offload_path,
        phase.launch.num_processes,
        sizes,
    )
    settings: Settings = {
        "train_batch_size": (phase.train.global_batch_size, "derived", "train.global_batch_size"),
        "train_micro_batch_size_per_gpu": (
            phase.derived.micro_batch_size,
            "derived",
            "global batch / accumulation / processes",
        ),
        "gradient_accumulation_steps": (
            phase.train.gradient_accumulation_steps,
            "derived",
            "train.gradient_accumulation_steps",
        ),
        "gradient_clipping": (
            0.0,
            "derived",
            "train.grad_clip_method value: DeepSpeed clips by norm only, the program by value",
        )
        if phase.train.grad_clip_method == "value"
        else (
            phase.train.max_grad_norm,
            "derived",
            "train.max_grad_norm; DeepSpeed would clip at 1.0 where nothing is said",
        ),
        "communication_data_type": (
            COMMUNICATION[precision],
            "derived",
            f"gradients are exchanged as they come under mixed_precision {precision}",
        ),
        **{f"zero_optimization.{key}": value for key, value in zero.items()},
        "bf16.enabled": (precision == "bf16", "derived", "launch.mixed_precision"),
        "fp16.enabled": (precision == "fp16", "derived", "launch.mixed_precision"),
    }
    if precision == "fp16":
        for key, value in phase.launch.fp16.model_dump().items():
            settings[f"fp16.{key}"] = (value, "derived", f"launch.fp16.{key}")
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        settings[f"activation_checkpointing.{key}"] = (
            getattr(phase.launch, key),
            "derived",
            f"launch.{key}",
        )
    if not is_plain_adam(phase.train.optimizer, phase.train.optimizer_args):
        name = phase.train.optimizer
        why = f"DeepSpeed takes few optimizers beside Adam by itself; {name} is tested"
        settings["zero_allow_untested_optimizer"] = (True, "derived", why)
        settings["zero_force_ds_cpu_optimizer"] = (False, "derived", why)
    if phase.launch.bf16_optimizer_states:
        why = "launch.bf16_optimizer_states: the program's own Adam, around DeepSpeed's"
        settings["zero_allow_untested_optimizer"] = (True, "derived", why)
    settings["steps_per_print"] = (NEVER, "default", "the program logs by itself")
    settings["wall_clock_breakdown"] = (False, "default", "timers would stop the GPU at every step")
    return settings
