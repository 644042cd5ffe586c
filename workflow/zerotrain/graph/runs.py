"""The runs of one call of snakemake, and the run of each job."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from zerotrain.config import MAIN_CONFIG
from zerotrain.config.models import Phase
from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import read_runs
from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.graph.checks import read_checked_runs
from zerotrain.importers import enable_launch_files

P = ParamSpec("P")
T = TypeVar("T")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Make a user's error end Snakemake with its message, without a traceback."""

    @wraps(function)
    def ended(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return function(*arguments, **named)
        except PipelineError as error:
            print(error, file=sys.stderr)
            sys.exit(EXIT_USER_ERROR)

    return ended


class Runs:
    """The runs that a configuration file plans.

    Args:
        by_file: The runs, by their files.
    """

    def __init__(self, by_file: Mapping[str, RunConfig]) -> None:
        self.by_name = {run.run: run for run in by_file.values()}
        self.files = {run.run: file for file, run in by_file.items()}
        self.by_data: dict[str, RunConfig] = {}
        for run in self.by_name.values():
            self.by_data.setdefault(run.data_name, run)

    @classmethod
    @checked
    def read(cls, files: Sequence[str], *, check: bool) -> Runs:
        """Read the configuration file that Snakemake is called with, or the default one.

        Args:
            files: The values of --configfile.
            check: Whether to check what the runs refer to. A job on a node is planned from checked
                runs, and may run where folders have other names.
        """
        enable_launch_files()
        path = Path(config_file(files))
        return cls(read_checked_runs(path) if check else read_runs(path))

    @checked
    def check_values(self, config: Mapping[str, Any], files: Sequence[str]) -> None:
        """Check that Snakemake has only values of the one file that the stages read.

        Args:
            config: Snakemake's values.
            files: The values of --configfile.
        """
        from snakemake.common.configfile import load_configfile

        path, values = config_file(files), dict(config)
        # Snakemake reads YAML 1.1, where `on` is true; comparing its reading of the file avoids a
        # false mismatch.
        own = dict(load_configfile(path))
        added = [key for key, value in values.items() if key not in own or value != own[key]]
        if len(files) > 1 or (added and not self._parses_as(values, path)):
            names = " and ".join(added or files[1:])
            raise PipelineError(
                f"{path}: {names} {'come' if len(added) > 1 else 'comes'} from --config or a "
                "second --configfile; the stages read one file and would not see them",
                hint=f"write them into {path}, or into a copy that --configfile names",
            )

    def _parses_as(self, values: Mapping[str, Any], path: str) -> bool:
        """Return whether values mean the run that was read, such as a default that is written."""
        try:
            return [parse_config(values, path)] == [*self.by_name.values()]
        except PipelineError:
            return False

    @property
    def are_several(self) -> bool:
        """Return whether rules have a wildcard for the run; rules of one run can be targets."""
        return len(self.by_name) > 1

    @property
    def first(self) -> RunConfig:
        """Return the first run."""
        return next(iter(self.by_name.values()))

    @property
    def results(self) -> str:
        """Return the folder of a run, as it appears in rules."""
        return "results/{run}" if self.are_several else f"results/{self.first.run}"

    @property
    def data(self) -> str:
        """Return the folder of a dataset, as it appears in rules."""
        return f"results/data/{'{data}' if self.are_several else self.first.data_name}"

    @property
    def shared(self) -> str:
        """Return the folder of the shared stages' logs, as it appears in rules."""
        return "results/{data}" if self.are_several else self.results

    @property
    def wildcards(self) -> dict[str, str]:
        """Return the values that each wildcard can take."""
        phases = {phase.name: None for run in self.by_name.values() for phase in run.phases}
        return {
            "run": "|".join(self.by_name),
            "data": "|".join(self.by_data),
            "phase": "|".join(phases),
            "size": r"\d+",
        }

    def of(self, wildcards: Any) -> RunConfig:
        """Return the run of a job; for a dataset and its caches the first run that shares them."""
        if data := wildcards.get("data"):
            return self.by_data[data]
        return self.by_name[wildcards.get("run") or next(iter(self.by_name))]

    def phase_of(self, wildcards: Any) -> Phase:
        """Return the phase of a job."""
        return self.of(wildcards).phase(wildcards.phase)

    def base_of_data(self, name: str) -> str:
        """Return the base whose encoders fill the caches of a dataset.

        It is the dataset's own base if that exists; else the base of the planned run with the
        dataset's name; else the dataset's own, which is then built.
        """
        own, shared = f"results/{name}/base", f"results/data/{name}/base"
        if os.path.isdir(shared):
            return f"{shared}/manifest.json"
        planned = name in self.by_name and self.by_name[name].data_name == name
        return f"{own if planned else shared}/manifest.json"


def hasten_plan() -> None:
    """Spare this process work that changes no result, while it plans and at its end.

    Modules and a graph are a million objects that live to the end. Looking through them again and
    again takes a quarter of the time of many runs, and at the exit a fifth of that of one run.
    """
    gc.freeze()
    gc.set_threshold(100_000)


def config_file(files: Sequence[str]) -> str:
    """Return the configuration file among the values of --configfile."""
    return os.path.relpath(next(iter(files), MAIN_CONFIG))
