"""The parameters of rules: configuration values that Snakemake records, and that rerun jobs."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import cache
from typing import Any

from zerotrain.config.stage_settings import SETTINGS, StageSettings
from zerotrain.pipeline.graph.runs import Runs

OfJob = Callable[[Any], Any]


class JobParameters:
    """The configuration values that jobs depend on.

    Args:
        runs: The runs that are planned.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def config_file(self, wildcards: Any, input: Any) -> str:
        """Return the file that stages read. Because it takes `input`, it reruns no job: the values
        that a stage reads are in its other parameters, and the file may be renamed."""
        return self._runs.files[self._runs.of(wildcards).run]

    def settings(self, rule: str) -> dict[str, OfJob]:
        """Return the parameters of a rule that record what its stage reads, by their names."""
        kind = SETTINGS[rule]

        @cache  # each parameter of a job asks for them
        def of(run: str, phase: str) -> StageSettings:
            return kind.of(self._runs.by_name[run], phase)

        def recorded(name: str) -> OfJob:
            def of_job(wildcards: Any) -> Any:
                settings = of(self._runs.of(wildcards).run, wildcards.get("phase", ""))
                return as_json(getattr(settings, name))

            return of_job

        return {name: recorded(name) for name in kind.paths(recorded=True)}

    def data(self, wildcards: Any) -> dict[str, Any]:
        """Return the values that a dataset is made from, without its name and number of workers."""
        data = self._runs.of(wildcards).data
        return data.model_dump(mode="json", exclude={"name", "num_workers"})


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


def as_json(value: Any) -> Any:
    """Return a value as Snakemake records it: sections as mappings, lists of sections as lists."""
    if isinstance(value, list):
        return [as_json(one) for one in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
