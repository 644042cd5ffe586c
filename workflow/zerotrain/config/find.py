"""Which file of config/ is a run's."""

from __future__ import annotations

import os
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from zerotrain.config.models import RunConfig
from zerotrain.config.read import read_config
from zerotrain.config.runs import shared_values
from zerotrain.errors import PipelineError

CONFIGS = Path("config")


def find_config(run: str, config: Path | None = None) -> Path:
    """The configuration file of a run that is named by itself or by the file.

    Raises:
        PipelineError: no file has the run, or several have.
    """
    if config is None and Path(run).suffix in (".yaml", ".yml"):
        return Path(os.path.relpath(run))
    if config is not None:
        found = read_config(config).run
        if run not in (found, str(config)):
            raise PipelineError(f"{config}: its run is {found}, not {run}", hint=f"name {found}")
        return Path(os.path.relpath(config))
    runs = {file: _run_of(file) for file in sorted(CONFIGS.glob("*.yaml"))}
    files = [file for file, found in runs.items() if found == run]
    if len(files) == 1:
        return files[0]
    if files:
        raise PipelineError(
            f"several files have the run {run}: {', '.join(map(str, files))}",
            hint=f"choose one: add --config {files[0]}",
        )
    here = ", ".join(f"{found} ({file})" for file, found in runs.items() if found) or "none"
    raise PipelineError(
        f"no file in {CONFIGS} has the run {run}",
        hint=f"runs here: {here}; name a file of another folder with --config",
    )


def has_owner(run: RunConfig) -> bool:
    """Whether a run of config/ is called like the dataset of `run`, and makes the same of it.

    Its base is then the one whose encoders fill their caches, whichever of the two is made first.
    """
    name = run.data_name
    files = [file for file in sorted(CONFIGS.glob("*.yaml")) if _run_of(file) == name]
    try:
        found = [read_config(file) for file in files]
    except PipelineError:
        return False
    return [name] == [one.data_name for one in found] and (
        shared_values(found[0]) == shared_values(run)
    )


def _run_of(file: Path) -> str | None:
    """The run that a file is for; others' mistakes are not ours to tell."""
    try:
        raw = YAML(typ="safe").load(file.read_text())
    except (OSError, UnicodeDecodeError, YAMLError):
        return None
    return str(raw["run"]) if isinstance(raw, dict) and "run" in raw else None
