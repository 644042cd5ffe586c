"""The inputs of rules, as functions of a job's wildcards."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from snakemake.io import ancient

from zerotrain.config.settings_file import read_mark
from zerotrain.graph.artifacts import Artifacts
from zerotrain.graph.files import PRESETS
from zerotrain.graph.runs import Runs

OfJob = Callable[[Any], Any]


class JobInputs:
    """The input files of jobs.

    Args:
        runs: The runs that are planned.
        artifacts: Their artifacts.
    """

    def __init__(self, runs: Runs, artifacts: Artifacts) -> None:
        self._runs = runs
        self._artifacts = artifacts
        self._base_of_data = cache(runs.base_of_data)  # called for each cache of each run

    def settings(self, stage: str) -> OfJob:
        """Return a function that returns the settings file of a stage's job."""
        return lambda wildcards: str(self._artifacts.find(stage, wildcards).settings_file)

    def manifests(self, stage: str, name: str) -> OfJob:
        """Return a function that lists the manifests of an input of a stage's job, if it has it."""
        return lambda wildcards: self._artifacts.find(stage, wildcards).manifests(name)

    def dataset_of_base(self, settings: str) -> OfJob:
        """Return a function that returns the dataset that a preset is built for, if it is one.

        A base that is built stays as it is when its dataset changes: built for an edited dataset,
        it would have all encoded and trained again. So to one that is current it is ancient.

        Args:
            settings: The base's settings file, as it appears in the rule.
        """

        def of_job(wildcards: Any) -> list[str]:
            file = Path(settings.format(**dict(wildcards.items())))
            planned = self._artifacts.of_settings(file)
            found = planned.manifests("dataset")
            stays = read_mark(planned.settings_file) is None and planned.outputs[0].exists()
            return [ancient(path) for path in found] if stays else found

        return of_job

    def config_file(self, wildcards: Any, input: Any) -> str:
        """Return the file that configures the run of a job.

        Because it takes `input`, Snakemake does not record it, and the file may be renamed.
        """
        return self._runs.files[self._runs.of(wildcards).run]

    def external_checkpoint(self, wildcards: Any) -> str | None:
        """Return the external checkpoint that the run continues from."""
        resume = self._runs.of(wildcards).resume_from_checkpoint
        return resume.folder if resume else None

    def phase_preset(self, wildcards: Any) -> str:
        """Return the launch preset of the phase."""
        return str(PRESETS / f"{self._runs.phase_of(wildcards).launch.preset}.yaml")

    def of_phases(self, *name: str) -> Callable[[Any], list[str]]:
        """Return a function that lists a file of each phase of the run, or its folder."""

        def of_job(wildcards: Any) -> list[str]:
            run = self._runs.of(wildcards)
            return [os.path.join("results", run.run, one.name, *name) for one in run.phases]

        return of_job

    def of_runs(self, *names: str, phases: slice = slice(None)) -> list[str]:
        """List files of each run; names with {phase} are listed once per phase."""
        return [
            f"results/{run.run}/{name.format(phase=phase)}"
            for run in self._runs.by_name.values()
            for name in names
            for phase in ([one.name for one in run.phases[phases]] if "{phase}" in name else [""])
        ]

    def datasets(self, *, of_presets: bool = False) -> list[str]:
        """List the datasets of all runs, or of those whose base is a preset."""
        found = self._runs.by_data.items()
        names = [name for name, run in found if run.is_preset or not of_presets]
        return [f"results/data/{name}/manifest.json" for name in names]

    def caches(self) -> list[str]:
        """List the caches of all runs, and the bases whose encoders fill them."""
        found: dict[str, None] = {}
        for run in self._runs.by_name.values():
            found[self._base_of_data(run.data_name)] = None
            for size in map(run.cache_size, run.phases):
                found[f"results/data/{run.data_name}/cache/{size}/manifest.json"] = None
        return [*found]


def option(name: str, input_name: str) -> Callable[[Any, Any], str]:
    """Return a function that gives a command's option for an optional input."""

    def of_job(wildcards: Any, input: Any) -> str:
        found = getattr(input, input_name)
        return shlex.join([name, str(found)]) if found else ""

    return of_job


def options(name: str, input_name: str) -> Callable[[Any, Any], str]:
    """Return a function that gives a command's option for each file of an input."""

    def of_job(wildcards: Any, input: Any) -> str:
        return " ".join(shlex.join([name, file]) for file in input.get(input_name, ()))

    return of_job
