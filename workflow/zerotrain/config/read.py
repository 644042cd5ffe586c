"""Reading a configuration file into a RunConfig, with messages that a user can act on."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from zerotrain.config.models import Phase, RunConfig
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError

PHASE_KEYS = ("name", "until", "launch", "allow", "validation")
"""The keys of a phase that are not training values."""

ZERO_KEYS = (
    "deepspeed",
    "offload_optimizer",
    "offload_param",
    "zero3_init",
    "partition_activations",
)
"""Keys of the run's `launch` that a phase of plain PyTorch leaves to the others."""

LAUNCH_FILES = (".yaml", ".yml", ".json")
"""Ends of a `launch:` that is accelerate's or DeepSpeed's file instead of a preset."""

SECTIONS = ("data", "cache", "lora", "train", "launch", "export", "evaluate")
"""The keys of a configuration that hold keys."""

EXPECTED = {
    "model_type": "must be keys with values",
    "dict_type": "must be keys with values",
    "string_type": "must be text; put it in quotes",
    "list_type": "must be a list",
}
"""Our words for pydantic's errors of type."""


def read_config(path: Path) -> RunConfig:
    """Read and validate a configuration file of one run.

    Raises:
        PipelineError: the file is missing, is no YAML mapping, or a value is wrong; the message
            names file, key and value.
    """
    raw = load_config(path)
    if isinstance(raw, dict) and "runs" in raw:
        raise PipelineError(
            f"{path}: plans several runs, and this wants one", hint="name the file of one of them"
        )
    return parse_config(raw, str(path))


def load_config(path: Path) -> Any:
    """What a configuration file holds, not validated.

    Raises:
        PipelineError: the file is missing or no YAML.
    """
    try:
        return YAML(typ="safe").load(path.read_text())
    except FileNotFoundError as error:
        raise PipelineError(
            f"{path}: no such configuration file",
            hint="name one with CONFIG=FILE or --configfile, or write one with `zerotrain new`",
        ) from error
    except OSError as error:
        raise PipelineError(
            f"{path}: cannot be read: {error.strerror}",
            hint="name a configuration file with CONFIG=FILE or --configfile",
        ) from error
    except (YAMLError, ValueError) as error:  # as a date that is none, or bytes that are no text
        raise PipelineError(
            f"{path}: not valid YAML: {' '.join(str(error).split())}",
            hint="check indentation, quotes and doubled keys near that line",
        ) from error


def parse_config(raw: Any, source: str) -> RunConfig:
    """Validate a configuration that has been read already; `source` names it in messages.

    Raises:
        PipelineError: listing every wrong key with its value and what would be right.
    """
    if not isinstance(raw, dict):
        raise PipelineError(
            f"{source}: holds {type(raw).__name__}, not keys with values",
            hint="start from config/config.yaml or `zerotrain new`",
        )
    try:
        return RunConfig.model_validate(expand_phases(raw))
    except ValidationError as error:
        lines = [_explain(detail) for detail in _once(error.errors())]
        raise PipelineError(
            f"{source}: " + "\n       ".join(line for line, _ in lines),
            hint="; ".join(dict.fromkeys(hint for _, hint in lines)),
        ) from error


def expand_phases(raw: dict[str, Any]) -> dict[str, Any]:
    """Merge the run's `train`, `launch` and `validation` into each phase, whose own values win.

    A section that holds nothing but comments is an empty one.
    """
    raw = {key: {} if value is None and key in SECTIONS else value for key, value in raw.items()}
    if not isinstance(raw.get("phases"), list):
        return raw
    run = _mapping(raw.get("launch"))
    launches = [_launch(phase) if isinstance(phase, dict) else None for phase in raw["phases"]]
    plain = [
        isinstance(launch, dict) and {**run, **launch}.get("preset", "torch") == "torch"
        for launch in launches
    ]
    phases: list[Any] = []
    for phase, launch, is_plain in zip(raw["phases"], launches, plain, strict=True):
        if not isinstance(phase, dict):
            phases.append(phase)
            continue
        own = {key: phase[key] for key in PHASE_KEYS if key in phase}
        changes = {key: value for key, value in phase.items() if key not in PHASE_KEYS}
        own["train"] = {**_mapping(raw.get("train")), **changes}
        if "validation" in raw and phase.get("validation", ...) is not None:
            own["validation"] = _with_own(raw["validation"], phase.get("validation", {}))
        if isinstance(launch, dict):
            # With no other phase to take them, they are refused instead of lost.
            left = ZERO_KEYS if is_plain and not all(plain) else ()
            own["launch"] = _merged({k: v for k, v in run.items() if k not in left}, launch)
            if str(own["launch"].get("preset")).endswith(LAUNCH_FILES):
                own |= _of_launch_file(own["launch"], own["train"])
        phases.append(own)
    return {**raw, "phases": phases}


def _launch(phase: dict[str, Any]) -> Any:
    """A phase's own launch; a preset's or a file's name alone is one, too."""
    launch = phase.get("launch")
    if launch is None:
        return {}
    return {"preset": launch} if isinstance(launch, str) else launch


def _of_launch_file(launch: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    """The launch and training values of a phase whose launch is a file of another program."""
    from zerotrain.importing.reading import launch_from_file  # it reads configurations, too

    rest = {key: value for key, value in launch.items() if key != "preset"}
    found = launch_from_file(Path(launch["preset"]), rest, train)
    return {"launch": _merged(found.launch, rest), "train": {**found.train, **train}}


def _merged(run: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A run's section with a phase's own values, also inside of keys that hold keys."""
    both = {
        key: _merged(run[key], value)
        for key, value in own.items()
        if isinstance(value, dict) and isinstance(run.get(key), dict)
    }
    return {**run, **own, **both}


def _with_own(run: Any, own: Any) -> Any:
    """A run's section with a phase's own values; what is no mapping is left to be refused."""
    return {**run, **own} if isinstance(run, dict) and isinstance(own, dict) else own or run


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _once(details: list[Any]) -> list[Any]:
    """Errors without those that a phase has only taken over from the run's sections."""

    def said(detail: Any, location: tuple[Any, ...]) -> tuple[Any, ...]:
        value = detail["input"]
        return location, detail["msg"], None if isinstance(value, dict) else repr(value)

    own = {said(d, d["loc"]) for d in details if d["loc"][:1] != ("phases",)}
    return [d for d in details if d["loc"][:1] != ("phases",) or said(d, d["loc"][2:]) not in own]


def _explain(detail: Any) -> tuple[str, str]:
    """One line and one hint for one of pydantic's errors."""
    location = [part for part in detail["loc"]]
    if location[:1] == ["phases"] and len(location) > 3 and location[2] == "train":
        location.pop(2)
    key = ".".join(str(part) for part in location)
    value = detail["input"]
    shown = "" if isinstance(value, dict | list | BaseModel) else f" (found {value!r})"
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), _keys_beside(detail["loc"]), n=1)
        hint = f"did you mean {near[0]}?" if near else _known_keys(detail["loc"])
        return f"{key}: unknown key{shown}", hint
    if detail["type"] == "missing":
        return f"{key}: missing", f"add `{location[-1]}:` to the file"
    message = EXPECTED.get(detail["type"], str(detail["msg"]).removeprefix("Value error, "))
    message = message[0].lower() + message[1:]
    if not key:
        return message, "mend the keys named above"
    return f"{key}: {message}{shown}", f"change {key}"


def _known_keys(location: tuple[Any, ...]) -> str:
    return "known keys here: " + ", ".join(_keys_beside(location))


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    """The keys that the section at a location takes."""
    model: Any = RunConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        model = next((a for a in get_args(annotation) if _is_model(a)), annotation)
    keys = list(model.model_fields)
    if model is Phase or (location[0] == "phases" and model is TrainConfig):
        keys = [*PHASE_KEYS, *TrainConfig.model_fields]
    return keys


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
