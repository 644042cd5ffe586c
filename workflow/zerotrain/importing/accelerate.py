"""accelerate's YAML, as `accelerate config` writes it, and the same as flags of its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from zerotrain.errors import PipelineError
from zerotrain.importing.batch import Part
from zerotrain.importing.deepspeed import Beside, load_json, read_deepspeed, read_plain
from zerotrain.importing.draft import AUTO, Draft, read_keys
from zerotrain.importing.keys_accelerate import ACCELERATE, DEEPSPEED_FLAGS
from zerotrain.importing.program import RUN

PLUGIN = "deepspeed_config."
FILLS = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
}
"""Where accelerate puts its own keys into a DeepSpeed configuration."""

PLAIN = ("NO", "MULTI_GPU", "MULTI_NPU", "MULTI_CPU")


def cached_config() -> Path | None:
    """The file that `accelerate config` wrote last, if there is one."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    hf_home = os.environ.get("HF_HOME", f"{home}/huggingface")
    path = Path(hf_home).expanduser() / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of keys.

    Raises:
        PipelineError: there is none, or it is no YAML with keys.
    """
    try:
        found = YAML(typ="safe").load(path.read_text())
    except OSError as error:
        raise PipelineError(
            f"{path}: cannot be read: {error.strerror}", hint="name a file that is there"
        ) from error
    except (YAMLError, ValueError) as error:
        raise PipelineError(
            f"{path}: not valid YAML: {' '.join(str(error).split())}",
            hint="check indentation, quotes and doubled keys near that line",
        ) from error
    if not isinstance(found, dict):
        raise PipelineError(
            f"{path}: holds {type(found).__name__}, not keys with values",
            hint="name a file that `accelerate config` wrote",
        )
    return found


def read_accelerate(
    config: Mapping[str, Any], path: Path | None, draft: Draft, beside: Beside
) -> None:
    """Read accelerate's configuration, and the DeepSpeed file that it names.

    Args:
        config: As the YAML has it; flags of the launcher stand at the same places.
        path: The YAML, beside which a DeepSpeed file is looked for too.
        draft: Gets keys of launch and train.
        beside: What is known from elsewhere.

    Raises:
        PipelineError: a key or value that cannot be taken, or values that contradict each other.
    """
    where = str(path or "accelerate launch")
    flat = read_keys(config, ACCELERATE, where, draft, auto_under=PLUGIN)
    if flat.pop("fp16", False):
        draft.say("kept", "fp16", True, "the old form", "launch.mixed_precision")
        flat.setdefault("mixed_precision", "fp16")
    precision = flat.get("mixed_precision")
    if precision is not None:
        beside = beside.with_precision(precision.casefold(), "mixed_precision")
    kind = _distributed_type(flat, draft, where)
    beside = _read_processes(flat, draft, beside, kind, where)
    for key, row in ACCELERATE.items():
        if row.fate == "passed on" and key in flat:
            if flat[key] in (row.default, AUTO):
                draft.say("kept", key, flat[key], "what the launch files say anyway", row.ours)
            else:
                draft.keep(key, flat[key], row.ours)
    if kind != "DEEPSPEED":
        _ignore_plugin(flat, draft)
        read_plain(draft, beside)
        return
    plugin = {k.removeprefix(PLUGIN): v for k, v in flat.items() if k.startswith(PLUGIN)}
    init = plugin.pop("zero3_init_flag", None)
    file = plugin.pop("deepspeed_config_file", "none")
    if file in ("none", AUTO, ""):
        _read_plugin(plugin, where, draft, beside)
    else:
        _read_file(file, plugin, path, draft, beside)
    if init not in (None, AUTO):
        key = PLUGIN + "zero3_init_flag"
        if str(draft.values["launch.preset"]).startswith("zero3"):
            draft.keep(key, init, "launch.zero3_init")
        else:
            draft.ignore(key, init, "a key of stage 3")


def _read_file(
    file: str, plugin: dict[str, Any], path: Path | None, draft: Draft, beside: Beside
) -> None:
    """With a DeepSpeed file."""
    found = find_file(file, path)
    draft.say("kept", PLUGIN + "deepspeed_config_file", file, "read below", "launch")
    json_config = load_json(found)
    for name, value in plugin.items():
        _fill(json_config, name, value, found, draft)
    if "zero_optimization" not in json_config:
        raise PipelineError(
            f"{found}: has no zero_optimization, which accelerate wants",
            hint="add it, with a stage",
        )
    if "gradient_accumulation_steps" not in json_config and beside.program is not RUN:
        json_config["gradient_accumulation_steps"] = 1  # accelerate adds it
    read_deepspeed(json_config, str(found), draft, beside)


def _distributed_type(flat: dict[str, Any], draft: Draft, where: str) -> str:
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
    draft.say("kept", "distributed_type", flat["distributed_type"], "", "launch.preset")
    return kind


def _read_processes(
    flat: dict[str, Any], draft: Draft, beside: Beside, kind: str, where: str
) -> Beside:
    given = flat.get("num_processes")
    if given == AUTO:
        given = None
    if given is not None and given < 1:
        raise PipelineError(
            f"{where}: num_processes is {given}",
            hint="say how many: --num-processes N",
        )
    asked = beside.processes.value
    if given is not None and asked not in (None, given):
        raise PipelineError(
            f"{where}: num_processes is {given}, but {asked} were asked for",
            hint="let both say the same",
        )
    processes = given or asked or 1
    if given is not None:
        draft.keep("num_processes", given, "launch.num_processes")
    else:
        reason = beside.processes.reason or "accelerate takes every GPU; here the number is said"
        draft.default("launch.num_processes", processes, reason)
    if machines := flat.get("num_machines"):
        if processes % machines:
            raise PipelineError(
                f"{where}: num_processes {processes} is no multiple of num_machines {machines}",
                hint="num_processes counts those of all machines",
            )
        if machines > 1:
            draft.keep("num_machines", machines, "launch.machines")
        else:
            draft.say("kept", "num_machines", machines, "asks for nothing more", "launch.machines")
    if "main_process_port" in flat and flat["main_process_port"] not in (AUTO, 0):
        draft.keep("main_process_port", flat["main_process_port"], "launch.main_process_port")
    elif "main_process_port" in flat:
        draft.ignore("main_process_port", flat["main_process_port"], "a free port is taken")
    return replace(beside, processes=Part(processes, "num_processes"))


def _ignore_plugin(flat: dict[str, Any], draft: Draft) -> None:
    for key, value in flat.items():
        if key.startswith(PLUGIN):
            draft.ignore(key, value, "DeepSpeed is not on")


def _read_plugin(plugin: dict[str, Any], where: str, draft: Draft, beside: Beside) -> None:
    """Without a DeepSpeed file: accelerate makes one of its own keys."""
    config: dict[str, Any] = {"zero_optimization": {"stage": plugin.pop("zero_stage", AUTO)}}
    draft.shown["zero_optimization.stage"] = PLUGIN + "zero_stage"
    for name, value in plugin.items():
        place = FILLS[name]
        into = config
        for part in place[:-1]:
            into = into.setdefault(part, {})
        into[place[-1]] = value
        draft.shown[".".join(place)] = PLUGIN + name
    read_deepspeed(config, where, draft, beside)


def _fill(config: dict[str, Any], name: str, value: Any, file: Path, draft: Draft) -> None:
    """One key of the YAML beside a DeepSpeed file: it may fill an "auto", and say nothing else."""
    into: Any = config
    place = FILLS[name]
    for part in place[:-1]:
        into = into.get(part) if isinstance(into, dict) else None
    stands = into.get(place[-1]) if isinstance(into, dict) else None
    key = PLUGIN + name
    if stands == AUTO:
        into[place[-1]] = value
        draft.say("kept", key, value, f"fills the auto of {'.'.join(place)}")
    elif stands == value:
        draft.ignore(key, value, f"{file.name} says the same")
    else:
        raise PipelineError(
            f"{key} is {value!r}, but {'.'.join(place)} of {file} is {stands!r}",
            hint="let the DeepSpeed file say it, and take it out of the YAML",
        )


def find_file(file: str, path: Path | None) -> Path:
    """A DeepSpeed file: from where the command runs, or beside the YAML."""
    named = Path(file).expanduser()
    places = [named]
    if path is not None:
        places += [path.parent / named, path.parent / named.name]
    for place in places:
        # isfile, unlike Path.is_file, takes a name that no file can have for one that is not there.
        if os.path.isfile(place):
            return place
    looked = ", ".join(dict.fromkeys(str(place) for place in places))
    raise PipelineError(
        f"{path or 'accelerate launch'}: names {file}, which is not there",
        hint=f"put it beside the YAML; looked for {looked}",
    )


def flags_as_config(flags: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Launcher's flags over a YAML: a flag wins, as it does in accelerate."""
    merged: dict[str, Any] = {**config}
    plugin = dict(merged.get("deepspeed_config") or {})
    for name, value in flags.items():
        if name in DEEPSPEED_FLAGS:
            plugin[name] = value
        else:
            merged[name] = value
    if plugin:
        merged["deepspeed_config"] = plugin
    return merged
