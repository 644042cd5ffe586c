"""accelerate's YAML, as written by `accelerate config`, and the same settings as launcher flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importers.deepspeed import read_deepspeed, read_plain
from zerotrain.importers.files import find_repeated_keys, load_deepspeed
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.importers.key_values import read_keys
from zerotrain.importers.program import RUN, Part, SurroundingSettings
from zerotrain.launch.keys import ACCELERATE, DEEPSPEED_FLAGS
from zerotrain.launch.resolved import nest_keys

PLUGIN = "deepspeed_config."
DYNAMO = "dynamo_config"
FILLS = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}
"""Where accelerate puts its keys in a DeepSpeed configuration."""

PLAIN = ("NO", "MULTI_GPU", "MULTI_NPU", "MULTI_CPU")


def read_accelerate(
    config: Mapping[str, Any],
    path: Path | None,
    result: ImportedConfig,
    context: SurroundingSettings,
) -> None:
    """Read accelerate's configuration, and the DeepSpeed file that it names.

    Args:
        config: The YAML's content; launcher flags are in the same places.
        path: The YAML file; a DeepSpeed file is searched for next to it too.
        result: Receives keys of launch and train.
        context: The surrounding settings.

    Raises:
        PipelineError: a key or value is not supported, or values contradict each other.
    """
    where = str(path or "accelerate launch")
    if isinstance(dynamo := config.get(DYNAMO), dict):
        # The launcher accepts these names with and without their prefix.
        config = {**config, DYNAMO: {_prefixed(name): value for name, value in dynamo.items()}}
    config = _without_sections_of_others(config, result)
    flat = read_keys(config, ACCELERATE, where, result, auto_under=PLUGIN)
    _put_compilation(flat, result)
    if flat.pop("fp16", False):
        result.note("kept", "fp16", True, "the old form", "launch.mixed_precision")
        flat.setdefault("mixed_precision", "fp16")
    precision = flat.get("mixed_precision")
    if precision is not None:
        own, source = context.precision, context.precision_source
        if source == "--mixed_precision" and own not in (None, precision.casefold()):
            reason = f"the script's own {source} {own} takes its place"
            result.note("changed", "mixed_precision", precision, reason, "launch.mixed_precision")
        else:
            context = context.with_precision(precision.casefold(), "mixed_precision")
    kind = _distributed_type(flat, result, where)
    context = _read_processes(flat, result, context, kind, where)
    for key, row in ACCELERATE.items():
        if row.fate == "passed_through" and key in flat:
            if flat[key] in (row.default, AUTO):
                result.note("kept", key, flat[key], "what the launch files say anyway", row.ours)
            else:
                result.keep(key, flat[key], row.ours)
    if kind != "DEEPSPEED":
        names = [key for key in flat if key.startswith(PLUGIN)]
        result.ignore_all(flat, names, "DeepSpeed is not on")
        read_plain(result, context)
        return
    plugin = {k.removeprefix(PLUGIN): v for k, v in flat.items() if k.startswith(PLUGIN)}
    init = plugin.pop("zero3_init_flag", None)
    file = plugin.pop("deepspeed_config_file", "none")
    if file in ("none", AUTO, ""):
        found = _as_deepspeed(plugin)
        result.shown |= {p: PLUGIN + name for name, p in FILLS.items() if p in found}
        read_deepspeed(nest_keys(found), where, result, context)
    else:
        _read_file(file, plugin, path, result, context)
    if init not in (None, AUTO):
        key = PLUGIN + "zero3_init_flag"
        if str(result.values["launch.preset"]).startswith("zero3"):
            result.keep(key, init, "launch.zero3_init")
        else:
            result.ignore(key, init, "a key of stage 3")


def _without_sections_of_others(
    config: Mapping[str, Any], result: ImportedConfig
) -> dict[str, Any]:
    """Leave out the sections that accelerate reads under another distributed_type alone."""
    kind, kept = str(config.get("distributed_type", "")).upper(), {**config}
    for name, of in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if kind in (*PLAIN, "FALSE", "DEEPSPEED") and kind != of and kept.get(name):
            result.ignore_all(kept, [name], f"accelerate reads it under distributed_type {of}")
    return kept


def note_repeated_keys(path: Path, result: ImportedConfig) -> None:
    """Note the keys of a YAML file that stand twice."""
    for name, line in find_repeated_keys(path).items():
        result.note("changed", name, None, f"it stands twice; that of line {line} counts")


def _read_file(
    file: str,
    plugin: dict[str, Any],
    path: Path | None,
    result: ImportedConfig,
    context: SurroundingSettings,
) -> None:
    """Read the DeepSpeed file that the YAML names, completed by the YAML's keys."""
    found, json_config = load_deepspeed(file, path)
    result.note("kept", PLUGIN + "deepspeed_config_file", file, "read below", "launch")
    for name, value in plugin.items():
        _fill(json_config, name, value, found, result)
    if "zero_optimization" not in json_config:
        raise PipelineError(
            f"{found}: has no zero_optimization, which accelerate requires",
            hint="add it, with a stage",
        )
    if "gradient_accumulation_steps" not in json_config and context.program is not RUN:
        json_config["gradient_accumulation_steps"] = 1  # accelerate adds it
    read_deepspeed(json_config, found, result, context)


def _distributed_type(flat: dict[str, Any], result: ImportedConfig, where: str) -> str:
    kind = str(flat.get("distributed_type", "")).upper()
    if not kind:
        raise PipelineError(
            f"{where}: has no distributed_type",
            hint="name a file that `accelerate config` wrote, or a DeepSpeed JSON",
        )
    if kind not in (*PLAIN, "DEEPSPEED"):
        raise PipelineError(
            f"{where}: distributed_type is {kind}",
            hint=f"zerotrain launches {', '.join(PLAIN)} and DEEPSPEED; ZeRO stage 3 shards what "
            "FSDP does",
        )
    result.note("kept", "distributed_type", flat["distributed_type"], "", "launch.preset")
    return kind


def _prefixed(name: object) -> str:
    return f"dynamo_{str(name).removeprefix('dynamo_')}"


def _put_compilation(flat: dict[str, Any], result: ImportedConfig) -> None:
    """Set torch.compile from dynamo_config or from the old top-level key."""
    mode_name, ours = f"{DYNAMO}.dynamo_mode", "launch.dynamo_mode"
    mode, on, nothing = flat.get(mode_name), False, "asks for nothing more"
    for name in (f"{DYNAMO}.dynamo_backend", "dynamo_backend"):
        backend = flat.get(name, "")
        if backend.casefold() == "no":
            result.note("kept", name, backend, nothing, "launch.dynamo_backend")
        elif name in flat:
            result.keep(name, backend, "launch.dynamo_backend", backend.casefold())
            on = True
    if mode is not None and not on:
        result.ignore(mode_name, mode, "no dynamo_backend compiles")
    elif mode == "default":
        result.note("kept", mode_name, mode, nothing, ours)
    elif mode is not None:
        result.keep(mode_name, mode, ours)


def _read_processes(
    flat: dict[str, Any],
    result: ImportedConfig,
    context: SurroundingSettings,
    kind: str,
    where: str,
) -> SurroundingSettings:
    given = None if flat.get("num_processes") == AUTO else flat.get("num_processes")
    if given is not None and given < 1:
        raise PipelineError(
            f"{where}: num_processes is {given}", hint="say how many: --num-processes N"
        )
    wanted = context.processes.value
    if given is not None and wanted not in (None, given):
        raise PipelineError(
            f"{where}: num_processes is {given}, but {wanted} were asked for",
            hint="let both say the same",
        )
    processes = given or wanted or 1
    if given is not None:
        result.keep("num_processes", given, "launch.num_processes")
    else:
        reason = context.processes.reason or "accelerate takes every GPU; here the number is given"
        result.assume("launch.num_processes", processes, reason)
    if machines := flat.get("num_machines"):
        if processes % machines:
            raise PipelineError(
                f"{where}: num_processes {processes} is no multiple of num_machines {machines}",
                hint="num_processes counts those of all machines",
            )
        ours = "launch.machines"
        if machines > 1:
            result.keep("num_machines", machines, ours)
        else:
            result.note("kept", "num_machines", machines, "asks for nothing more", ours)
    port = flat.get("main_process_port")
    if port not in (None, AUTO, 0):
        result.keep("main_process_port", port, "launch.main_process_port")
    elif port is not None:
        result.ignore("main_process_port", port, "a free port is taken")
    return replace(context, processes=Part(processes, "num_processes"))


def _as_deepspeed(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that accelerate builds from its own keys if no file is named."""
    given = {FILLS[name]: plugin[name] for name in plugin if name in FILLS}
    return {FILLS["zero_stage"]: AUTO} | {k: v for k, v in given.items() if v is not None}


def deepspeed_of(config: Mapping[str, Any], path: Path | None) -> tuple[str, dict[str, Any]] | None:
    """Return accelerate's DeepSpeed configuration with its name; None if it has none.

    Raises:
        PipelineError: it names a missing file.
    """
    if str(config.get("distributed_type", "")).upper() != "DEEPSPEED":
        return None
    plugin = config.get("deepspeed_config") or {}
    file = plugin.get("deepspeed_config_file", "none")
    if file not in (None, "none", AUTO, ""):
        return str(file), load_deepspeed(str(file), path)[1]
    return f"{path or 'accelerate launch'}: deepspeed_config", nest_keys(_as_deepspeed(plugin))


def _fill(config: dict[str, Any], name: str, value: Any, file: str, result: ImportedConfig) -> None:
    """Let a key of the YAML replace an "auto" in the DeepSpeed file; refuse other changes."""
    *sections, last = FILLS[name].split(".")
    into: Any = config
    for part in sections:
        into = _section(into).get(part)
    stands, key = _section(into).get(last), PLUGIN + name
    if stands == AUTO:
        into[last] = value
        result.note("kept", key, value, f"fills the auto of {FILLS[name]}")
    elif stands == value:
        result.ignore(key, value, f"{Path(file).name} says the same")
    else:
        raise PipelineError(
            f"{key} is {value!r}, but {FILLS[name]} of {file} is {stands!r}",
            hint="let the DeepSpeed file say it, and take it out of the YAML",
        )


def _section(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def flags_as_config(flags: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Override a YAML's values by the launcher's flags, as accelerate does."""
    merged: dict[str, Any] = {**config}
    plugin = dict(merged.get("deepspeed_config") or {})
    dynamo = {_prefixed(name): value for name, value in (merged.get(DYNAMO) or {}).items()}
    for name, value in flags.items():
        if name in DEEPSPEED_FLAGS:
            plugin[name] = value
        elif name.startswith("dynamo_"):
            dynamo[name] = value
            merged.pop(name, None)
        else:
            merged[name] = value
    if plugin:
        merged["deepspeed_config"] = plugin
    if dynamo:
        merged[DYNAMO] = dynamo
    return merged


def say_bf16_weights(
    result: ImportedConfig, config: Mapping[str, Any], program: str, *, in_bf16: bool
) -> None:
    """Report that a program trains bf16 weights, while a run's are float32.

    DeepSpeed keeps a float32 copy of each weight, so under it there is no difference.

    Args:
        result: Receives the note.
        config: accelerate's configuration of the training.
        program: The training program.
        in_bf16: Whether it casts the trained weights to bf16.
    """
    if in_bf16 and str(config.get("distributed_type", "")).upper() != "DEEPSPEED":
        result.note(
            "changed", "trained weights", None,
            f"float32; {program} rounds them to bf16 after each step, as DeepSpeed is not on",
        )  # fmt: skip
