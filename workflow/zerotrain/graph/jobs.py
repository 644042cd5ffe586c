"""The inputs of jobs, as functions of their wildcards, and the resources that they need.

A profile gives those of the machine (docs/sweeps.md).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from snakemake.io import ancient

from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import read_mark
from zerotrain.graph.artifacts import PRESETS, Artifacts
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


GIB = 2**30
UNKNOWN = 32 * GIB  # per process, if the planner does not know the model
LIGHT = GIB  # hashes, lists, decoded images of one process: 0.2 GiB; Snakemake in the job: 0.4
BUILD = 3 * GIB  # torch with one shard of a base at a time
MEMORY = {"mem_mb", "mem_mib"}  # mem_mb_per_cpu is omitted: it is set for every job
NO_GPU = ("none", "", "0")
MOST = 2  # factor on the forecast: more would exceed nodes and limits for jobs that never fit

OfAttempt = Callable[[Any, int], int]


class JobResources:
    """The threads, memory, time, GPUs and machines of jobs.

    Args:
        runs: The runs that are planned.
        workflow: Snakemake's workflow object.
    """

    def __init__(self, runs: Runs, workflow: Any) -> None:
        self._runs = runs
        self._workflow = workflow

    def stage_threads(self, wildcards: Any) -> int:
        """Return the CPU threads of a single-process stage."""
        return self._runs.of(wildcards).launch.num_cpu_threads_per_process or _cpus()

    def reading_threads(self, wildcards: Any) -> int:
        """Return the CPU threads that read a dataset."""
        return max(1, self._runs.of(wildcards).data.num_workers)

    def phase_threads(self, wildcards: Any) -> int:
        """Return the CPU threads of the phase's processes on one machine."""
        phase = self._runs.phase_of(wildcards)
        threads = phase.launch.num_cpu_threads_per_process
        return threads * _processes(phase) if threads else _cpus()

    def memory(self, stage: str) -> dict[str, OfAttempt]:
        """Return mem_mb: MiB per machine, doubled after a failure.

        Return nothing unless a profile asks for it: without a cluster all jobs share the machine,
        and a forecast is not worth the second it takes.
        """
        if not self._memory_is_asked():
            return {}
        times = self._times_of_training if stage == "train_phase" else _times

        def of_attempt(wildcards: Any, attempt: int) -> int:
            return -(-self._bytes(stage, wildcards) // 2**20) * times(wildcards, attempt)

        return {"mem_mb": of_attempt}

    def minutes(self, count: int) -> OfAttempt:
        """Return the minutes of a stage that restarts after a failure, with twice the time."""
        return lambda wildcards, attempt: count * _times(wildcards, attempt)

    def phase_gres(self, wildcards: Any) -> str:
        """Return the GPUs per machine, one per process."""
        return f"gpu:{_processes(self._runs.phase_of(wildcards))}"

    def machines(self, wildcards: Any) -> int | None:
        """Return the number of machines of a multi-machine phase; None for one machine."""
        machines = self._runs.phase_of(wildcards).launch.machines
        return machines if machines > 1 else None

    def multi_node(self, value: Any) -> OfJob:
        """Return a function that gives a resource only to multi-machine phases."""
        return lambda wildcards: value if self.machines(wildcards) else None

    def _times_of_training(self, wildcards: Any, attempt: int) -> int:
        """Return the memory factor of a training. One that stopped at its time limit resumes with
        the same memory: a node may not have more."""
        run = self._runs.of(wildcards)
        killed = _killed_before(f"results/{run.run}/{wildcards.phase}/progress", attempt)
        return min(1 + killed, MOST)

    def _memory_is_asked(self) -> bool:
        """Return whether profile or command line set a job's memory; a job on a node has its memory
        already."""
        settings = self._workflow.resource_settings
        asked = [*(settings.default_resources or ()), *(settings.resources or ())]
        return not self._workflow.remote_exec and not MEMORY.isdisjoint(asked)

    def _bytes(self, stage: str, wildcards: Any) -> int:
        """Return the bytes per machine: constant for stages without a model, else the forecast."""
        run = self._runs.of(wildcards)
        if stage == "prepare_dataset":
            return LIGHT * (1 + max(1, run.data.num_workers) // 4)
        if stage == "build_base":
            return BUILD
        phases = [self._runs.phase_of(wildcards)] if wildcards.get("phase") else run.phases
        return max(self._forecast(run, phase, stage) for phase in phases)

    def _forecast(self, run: RunConfig, phase: Phase, stage: str) -> int:
        """Return the planner's forecast, or a default with one warning per run."""
        found = self._forecasts[run.run, phase.name, not self._has_gpu]
        if "bytes" in found:
            return int(found["bytes"][stage])
        _warn_once(run.run, found["unknown"])
        return UNKNOWN * (_processes(phase) if stage == "train_phase" else 1)

    @cached_property
    def _forecasts(self) -> Mapping[tuple[str, str, bool], Mapping[str, Any]]:
        """Return the forecasts of all phases, computed together at first use."""
        # Planning without a cluster does not need the planner.
        from zerotrain.launch.planner.forecasts import forecasts

        return forecasts(
            (run, phase, not self._has_gpu)
            for run in self._runs.by_name.values()
            for phase in run.phases
        )

    @cached_property
    def _has_gpu(self) -> bool:
        """Return whether trainings use GPUs; a profile disables it with `gres: none`."""
        chosen = (self._workflow.resource_settings.overwrite_resources or {}).get("train_phase")
        gres = chosen.get("gres") if chosen else None
        return gres is None or str(gres.raw) not in NO_GPU


def _cpus() -> int:
    return os.cpu_count() or 1


def _processes(phase: Phase) -> int:
    """Return the number of processes of a phase on one machine."""
    return phase.launch.num_processes // phase.launch.machines


def _times(wildcards: Any, attempt: int) -> int:
    return min(attempt, MOST)


@cache
def _killed_before(progress: str, attempt: int) -> int:
    """Count the attempts of a training that left no exit.json, as when the system kills it for
    memory; called before each attempt for the one before it."""
    if attempt == 1:
        return 0
    return _killed_before(progress, attempt - 1) + (not Path(progress, "exit.json").exists())


@cache
def _warn_once(run: str, why: str) -> None:
    """Warn that a run's memory is unknown."""
    print(
        f"WARNING: run {run}: its memory cannot be forecast, {UNKNOWN // GIB} GiB a process is "
        f"asked for; set it in the profile (set-resources): {why}",
        file=sys.stderr,
    )
