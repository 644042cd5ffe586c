"""The runs that a configuration file plans: its own, or those of the files under its `runs`.

And the other way: which file of config/ is a run's.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import CONFIGS, runs_here
from zerotrain.config import MAIN_CONFIG
from zerotrain.config.read import load_config, parse_config
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import BuildSettings, CacheSettings
from zerotrain.config.suggestions import after_question
from zerotrain.errors import PipelineError

KEY = "runs"


def read_runs(path: Path) -> dict[str, RunConfig]:
    """Read the runs of a configuration file, by the files that hold them.

    Args:
        path: The file of one run, or one whose only key is `runs`: a list of files or glob
            patterns, relative to the working directory.

    Raises:
        PipelineError: a file is wrong, two runs have one name, or runs that share a dataset differ
            in what it or its cache depends on.
    """
    raw = load_config(path)
    if not (isinstance(raw, dict) and KEY in raw):
        return {str(path): parse_config(raw, str(path), path)}
    runs = {}
    for file in listed_files(raw, path):
        own = load_config(file)
        if isinstance(own, dict) and KEY in own:
            raise PipelineError(
                f"{path}: runs: {file} has `runs` itself", hint="name files of one run each"
            )
        runs[str(file)] = parse_config(own, str(file), file)
    _refuse_equal_names(runs)
    _refuse_other_data(runs)
    return runs


def shared_values(run: RunConfig) -> dict[str, Any]:
    """Return what the dataset and its caches are made from, which runs of one data.name share.

    The caches' own sizes are left out, for each has a folder of its own.
    """
    found = {
        **{f"data.{key}": value for key, value in run.data if key not in ("name", "num_workers")},
        "family": run.family,
        **BuildSettings.of(run).by_key(),
        "validation.prompts": run.validation_prompts,
        **CacheSettings.of(run).by_key(),
    }
    del found["cache.shards"]
    return found


def listed_files(raw: Mapping[str, Any], path: Path) -> list[Path]:
    """Return the files that are listed under `runs`, each once, in the order of the list.

    Args:
        raw: What the file has.
        path: The file.

    Raises:
        PipelineError: the file has other keys, or a pattern that no file has.
    """
    if others := [key for key in raw if key != KEY]:
        raise PipelineError(
            f"{path}: {', '.join(map(str, others))}: not next to `runs`, of which each has its own",
            hint="move these keys into the files under `runs`, or remove `runs`",
        )
    listed = raw[KEY]
    if not (isinstance(listed, list) and listed and all(isinstance(one, str) for one in listed)):
        raise PipelineError(
            f"{path}: runs: must be a list of files or patterns (found {listed!r})",
            hint="as `runs: [config/lr/*.yaml]`",
        )
    return list(dict.fromkeys(file for pattern in listed for file in _found(pattern, path)))


def _found(pattern: str, path: Path) -> Iterator[Path]:
    here = os.path.relpath(path)
    if not set(pattern) & set("*?["):
        yield Path(pattern)
        return
    found = [Path(one) for one in sorted(glob(pattern)) if os.path.relpath(one) != here]
    if not found:
        raise PipelineError(
            f"{path}: runs: {pattern}: no such file",
            hint="patterns begin at the folder in which `snakemake` is called",
        )
    yield from found


def _refuse_equal_names(runs: Mapping[str, RunConfig]) -> None:
    files: dict[str, str] = {}
    for file, run in runs.items():
        if run.run in files:
            raise PipelineError(
                f"{files[run.run]} and {file}: both have the run {run.run}, and would write one "
                "folder",
                hint="give one of them another `run`",
            )
        files[run.run] = file


def _refuse_other_data(runs: Mapping[str, RunConfig]) -> None:
    """Check that runs of one dataset or cache make it in the same way."""
    first: dict[str, tuple[str, dict[str, Any]]] = {}
    for file, run in runs.items():
        values = shared_values(run)
        of, others = first.setdefault(run.data_name, (file, values))
        for key in {**others, **values}:
            if others.get(key) != values.get(key):
                raise PipelineError(
                    f"{of} and {file}: {key}: {others.get(key)!r} and {values.get(key)!r}, but "
                    f"both have the data.name {run.data_name}, whose files depend on it",
                    hint="give them one value, or each its own data.name",
                )


def is_file_name(text: str) -> bool:
    """Return whether a word that names a run names its file, there or not."""
    path = Path(text)
    return path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file()


def find_config(run: str) -> Path:
    """Find the configuration file of a run, which is named by its name or by that file.

    Raises:
        PipelineError: no file has the run, or several have.
    """
    if is_file_name(run):
        if not (file := Path(run)).is_file():
            load_config(file)  # it has the sentence for what is in its place
        inside = os.path.relpath(file)
        return file if inside.startswith(os.pardir) else Path(inside)
    runs = runs_here()
    files = [file for file, found in runs.items() if found == run]
    if len(files) == 1:
        return files[0]
    if files:
        raise PipelineError(
            f"several files have the run {run}: {', '.join(map(str, files))}",
            hint="name one of these files instead",
        )
    here = ", ".join(f"{found} ({file})" for file, found in runs.items() if found) or "none"
    raise PipelineError(
        f"no file in {CONFIGS} has the run {run}",
        hint=after_question(
            run,
            filter(None, runs.values()),
            f"runs here: {here}; a file of another folder is named as FILE.yaml",
        ),
    )


def train_command(config: Path) -> str:
    """Return the command that trains a run to its end."""
    return shlex.join(["snakemake", "--cores", "all", "train", *config_option(config)])


def config_option(config: Path) -> list[str]:
    """Return the option that names a configuration; nothing for the default one."""
    return [] if config == MAIN_CONFIG else ["--configfile", str(config)]
