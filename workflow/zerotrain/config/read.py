"""Reading a configuration file into a RunConfig, with messages that a user can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zerotrain.artifact.documents import MissingFileError, read_text, read_yaml
from zerotrain.config import read_launch_file
from zerotrain.config.problems import (
    PHASE_KEYS,
    InvalidConfigError,
    explain_errors,
    find_mistyped,
)
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError

ZERO_KEYS = (
    "deepspeed",
    "offload_optimizer",
    "offload_param",
    "bf16_optimizer_states",
    "zero3_init",
    "partition_activations",
)
"""Keys of the run's `launch` that a phase of plain PyTorch leaves to the others."""

SECTIONS = ("data", "cache", "lora", "train", "launch", "export", "evaluate")
"""The keys of a configuration that hold keys."""

MOST_BYTES = 2**20
"""Size of a configuration: a sweep of hundreds of runs has a file for each."""
HINT = "correct that place of the file; an editor that knows YAML shows it"
LAUNCH_FILES = (".yaml", ".yml", ".json")
"""Ends of a `launch:` that is accelerate's or DeepSpeed's file instead of a preset."""


def read_config(path: Path) -> RunConfig:
    """Read and validate a configuration file of one run.

    Raises:
        PipelineError: the file is missing, is no YAML mapping, or a value is wrong; the message
            names file, key and value.
    """
    raw = load_config(path)
    if isinstance(raw, dict) and "runs" in raw:
        raise PipelineError(
            f"{path}: plans several runs, and this needs one", hint="name the file of one of them"
        )
    return parse_config(raw, str(path), path)


def load_config(path: Path) -> Any:
    """Read a configuration file, without validating it.

    Raises:
        PipelineError: the file is missing or no YAML.
    """
    try:
        return read_yaml(path, most=MOST_BYTES, follow_links=True, hint=HINT)
    except MissingFileError as error:
        raise PipelineError(
            f"{path}: no such configuration file",
            hint="name one with CONFIG=FILE or --configfile, or write one with `zerotrain new`",
        ) from error
    except OSError as error:
        raise PipelineError(
            f"{path}: cannot be read: {error.strerror}",
            hint="name a configuration file with CONFIG=FILE or --configfile",
        ) from error


def parse_config(raw: Any, source: str, file: Path | None = None) -> RunConfig:
    """Validate a configuration that has been read already.

    Args:
        raw: What was read.
        source: What messages call it.
        file: The file that holds it, for the lines in messages; None if none does.

    Raises:
        PipelineError: listing every wrong key with its value and what would be right.
    """
    if not isinstance(raw, dict):
        kind = "a list" if isinstance(raw, list) else "one value"
        found = "is empty" if raw is None else f"holds {kind}, not keys with values"
        raise PipelineError(
            f"{source}: {found}", hint="start from config/config.yaml or `zerotrain new`"
        )
    try:
        return RunConfig.model_validate(expand_phases(raw))
    except ValidationError as error:
        text = read_text(file, follow_links=True) if file else None
        details, meant = _without_follow_ons(error.errors(), raw)
        raise InvalidConfigError(source, explain_errors(details), meant, text) from error


def _without_follow_ons(
    details: list[ErrorDetails], raw: dict[str, Any]
) -> tuple[list[ErrorDetails], dict[str, Any]]:
    """Return the errors, and the values, with mistyped sections read as those that are meant."""
    names = find_mistyped(raw)
    if not names:
        return details, raw
    meant = {names.get(key, key): value for key, value in raw.items()}
    causes = [one for one in details if len(one["loc"]) == 1 and one["loc"][0] in names]
    try:
        RunConfig.model_validate(expand_phases(meant))
    except ValidationError as error:
        causes += error.errors()
    return causes, meant


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
    """Return a phase's own launch; the name of a preset or of a file is one, too."""
    launch = phase.get("launch")
    if launch is None:
        return {}
    return {"preset": launch} if isinstance(launch, str) else launch


def _of_launch_file(launch: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    """Return the launch and training values of a phase whose launch is another program's file."""
    rest = {key: value for key, value in launch.items() if key != "preset"}
    launch_of_file, train_of_file = read_launch_file(Path(launch["preset"]), rest, train)
    return {"launch": _merged(launch_of_file, rest), "train": {**train_of_file, **train}}


def _merged(run: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge a phase's own values into a run's section, also inside of keys that hold keys."""
    both = {
        key: _merged(run[key], value)
        for key, value in own.items()
        if isinstance(value, dict) and isinstance(run.get(key), dict)
    }
    return {**run, **own, **both}


def _with_own(run: Any, own: Any) -> Any:
    """Merge a phase's own values into a run's section; what is no mapping is left to be refused."""
    return {**run, **own} if isinstance(run, dict) and isinstance(own, dict) else own or run


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
