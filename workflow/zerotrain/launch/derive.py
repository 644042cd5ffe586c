"""Values of the two launch files: derived from the resolved phase and the model, or the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerotrain.config.launch import LaunchConfig
from zerotrain.config.optimizers import is_plain_adam
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase, Settings, leaves, nest_keys
from zerotrain.launch.zero import zero_optimization
from zerotrain.models.sizes import ModelSizes

if TYPE_CHECKING:
    from zerotrain.launch.keys import Key


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


CHOICES = {"communication_data_type": ("fp32", "fp16", "bf16")}
EXPECTED = {
    "boolean": "true or false",
    "integer": "a whole number from 0",
    "number": "a number from 0",
    "string": "text",
    "list": "a list",
}


def overlay(settings: Settings, program: str, given: Mapping[str, Any], phase: str) -> Settings:
    """Return the settings with a user's values applied.

    Args:
        settings: The derived settings.
        program: "deepspeed" or "accelerate": the program that reads the file.
        given: The user's values, nested as in that file.
        phase: The phase, for messages.

    Raises:
        PipelineError: a key is unknown, corresponds to one of ours, has no effect, or is refused;
            or a value is "auto" or of another type.
    """
    result = dict(settings)
    if not given:
        return result
    # It reads its tables, which takes as long as the rest of a plan of the phase.
    from zerotrain.launch import keys

    table = {"deepspeed": keys.DEEPSPEED, "accelerate": keys.ACCELERATE}[program]
    for dotted, value in leaves(given):
        where = f"phase {phase}: launch.{program}.{dotted}: {value!r}"
        key = _find(table, dotted)
        if dotted in table and key is None:
            if value == {}:
                continue  # a block without keys changes nothing
            raise PipelineError(f"{where} is no value for it", hint="it takes a mapping")
        if key is None:
            raise keys.unknown_key(f"phase {phase}: launch.{program}", dotted, list(table))
        if value == "auto":
            raise PipelineError(
                f"{where}: nothing is left open in a launch file",
                hint="give a value, or remove the key: what is not given is derived",
            )
        if key.fate != "passed_through":
            if key.default == value and key.fate != "mapped":
                continue  # the default of such a key changes nothing
            raise PipelineError(where + _why(key), hint=_suggest(key))
        value = _number(value, key)
        if not _fits(value, key, dotted):
            words = ", ".join(CHOICES.get(dotted, (EXPECTED.get(key.type, "a mapping"),)))
            raise PipelineError(f"{where} is no value for it", hint=f"it takes {words}")
        result[dotted] = (value, "user", f"launch.{program}")
    return result


def _find(table: Mapping[str, Key], dotted: str) -> Key | None:
    """Return a key's own row, or that of the block that contains it."""
    if dotted in table and table[dotted].type != "section":
        return table[dotted]
    *sections, _ = dotted.split(".")
    above = (table.get(".".join(sections[:n])) for n in range(len(sections), 0, -1))
    return next((key for key in above if key is not None and key.type == "block"), None)


def _why(key: Key) -> str:
    if key.fate == "mapped":
        return " has its own key here, so that no value is set in two places"
    if key.fate == "ignored_no_effect":
        return f" would do nothing: {key.reason}"
    return f" is not possible: {key.reason}"


def _suggest(key: Key) -> str:
    return f"set {key.ours}" if key.fate == "mapped" else "remove the key"


def _number(value: Any, key: Key) -> Any:
    """Read 5e8 and "5e8" as whole numbers, which JSON readers need."""
    if isinstance(value, str) and key.type in ("integer", "number"):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _fits(value: Any, key: Key, dotted: str) -> bool:
    if dotted in CHOICES:
        return value in CHOICES[dotted]
    if type(value) is type(key.default) and value == key.default:
        return True  # DeepSpeed's depth of all modules is -1
    if key.type in ("integer", "number"):
        numbers = int if key.type == "integer" else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool) and value >= 0
    if key.type == "block" and dotted == key.name:
        return isinstance(value, Mapping)
    types = {"boolean": bool, "string": str, "list": list}
    return isinstance(value, types.get(key.type, object))
