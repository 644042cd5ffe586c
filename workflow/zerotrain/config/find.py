"""Which file of config/ is a run's."""

from __future__ import annotations

import os
from pathlib import Path

from zerotrain.artifact.layout import CONFIGS, files_of, runs_here
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import shared_values
from zerotrain.config.suggestions import after_question
from zerotrain.errors import PipelineError


def find_config(run: str, config: Path | None = None) -> Path:
    """Find the configuration file of a run, which is named by its name or its file.

    Raises:
        PipelineError: no file has the run, or several have.
    """
    if config is None and Path(run).suffix in (".yaml", ".yml"):
        return Path(os.path.relpath(run))
    if config is not None:
        found = read_config(config).run
        if run not in (found, str(config)):
            raise PipelineError(
                f"{config}: its run is {found}, not {run}",
                hint=f"give the name {found}, or the file of {run}",
            )
        return Path(os.path.relpath(config))
    runs = runs_here()
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
        hint=after_question(
            run,
            filter(None, runs.values()),
            f"runs here: {here}; name a file of another folder with --config",
        ),
    )


def has_owner(run: RunConfig) -> bool:
    """Return whether a run of config/ has the dataset's name, and the same dataset as `run`.

    Its base is then the one whose encoders fill their caches, whichever of the two is made first.

    Its base is then the one whose encoders fill their caches, whichever of the two is made first.
    """
    name = run.data_name
    files = files_of(name)
    try:
        found = [read_config(file) for file in files]
    except PipelineError:
        return False
    return [name] == [one.data_name for one in found] and (
        shared_values(found[0]) == shared_values(run)
    )
