"""dvc.yaml, generated from a configuration: a stage per folder of results, or per phase."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerotrain.artifact import write_whole
from zerotrain.artifact.layout import DATA, RESULTS
from zerotrain.config import MAIN_CONFIG
from zerotrain.config.runs import read_runs
from zerotrain.errors import PipelineError
from zerotrain.graph.dvc.files import PIPELINE, as_text, load_pipeline
from zerotrain.graph.dvc.plots import plots_of
from zerotrain.graph.dvc.stages import Stage, stages_of
from zerotrain.graph.runs import Runs
from zerotrain.importers import enable_launch_files

TEMPLATE = "${"
"""What DVC reads as the beginning of a value to insert, in every text of dvc.yaml."""


def generate(config: Path, output: Path = PIPELINE) -> None:
    """Write dvc.yaml for the runs of a configuration; what is in it of others stays.

    Args:
        config: The configuration.
        output: File to write; the old text stays until the new text is complete.

    Raises:
        PipelineError: the configuration or the old file is wrong.
        DiskError: the disk is full or read-only, or fails.
    """
    loaded = load_pipeline(output) if output.is_file() else {}
    write_whole(output, as_text(merged(loaded, pipeline(config), config)))


def pipeline(config: Path) -> dict[str, Any]:
    """Build the stages and plots of a configuration's runs.

    Raises:
        PipelineError: the configuration is wrong, or a name holds `${`.
    """
    enable_launch_files()
    by_file = read_runs(config)
    runs = Runs(by_file)
    stages: dict[str, Stage] = {}
    for file, run in by_file.items():
        for folder, stage in stages_of(run, Path(file), config, runs):
            name = "-".join(folder.relative_to(RESULTS).parts)
            if stages.get(name, stage)["outs"] != stage["outs"]:
                raise PipelineError(
                    f"{config}: two stages of dvc.yaml would have the name {name}",
                    hint="rename the run or the phase, so that no run has the name of another with "
                    "a phase's behind it",
                )
            stages.setdefault(name, stage)
    made = {
        "stages": stages,
        "plots": [plot for run in by_file.values() for plot in plots_of(run)],
    }
    for text in _texts(made):
        if TEMPLATE in text:
            raise PipelineError(
                f"{text!r}: holds {TEMPLATE}, which DVC would replace by a value of params.yaml",
                hint="rename the file or folder, and correct the configuration",
            )
    return made


def merged(loaded: Mapping[str, Any], made: Mapping[str, Any], config: Path) -> dict[str, Any]:
    """Return a dvc.yaml in which the stages and plots of a configuration are replaced.

    Args:
        loaded: The content of dvc.yaml.
        made: The stages and plots of the configuration as it is now.
        config: The configuration.
    """
    stages = loaded.get("stages") or {}
    others = {name: stage for name, stage in stages.items() if config_of(stage) != config}
    former = [stage for name, stage in stages.items() if name not in others]
    outs = [out for stage in [*former, *made["stages"].values()] for out in outputs_of(stage)]
    runs = tuple({f"{RESULTS}/{out.split('/')[1]}/" for out in outs} - {f"{RESULTS}/{DATA}/"})
    plots = [
        plot
        for plot in loaded.get("plots") or []
        if not any(text.startswith(runs) for text in _texts(plot))
    ]
    return {
        **loaded,
        "stages": made["stages"] | {n: one for n, one in others.items() if n not in made["stages"]},
        "plots": [*made["plots"], *plots],
    }


def config_of(stage: Any) -> Path | None:
    """Return the configuration of a generated stage; None for a stage of the user."""
    command = stage.get("cmd") if isinstance(stage, Mapping) else None
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return None
    if words[:3] != ["snakemake", "--cores", "all"] or not outputs_of(stage):
        return None
    chosen = [after for word, after in pairwise(words) if word == "--configfile"]
    return Path(chosen[0]) if chosen else MAIN_CONFIG


def outputs_of(stage: Mapping[str, Any]) -> list[str]:
    """List the outputs and metrics of a stage below results/."""
    lists = [stage.get(key) for key in ("outs", "metrics")]
    listed = [one for found in lists if isinstance(found, list) for one in found]
    names = [next(iter(one), None) if isinstance(one, Mapping) else one for one in listed]
    return [one for one in names if isinstance(one, str) and one.startswith(f"{RESULTS}/")]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of dvc.yaml, keys included."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
