"""The jobs of `snakemake train`, as Snakemake sees them.

Snakemake's public API gives the graph only as text. This module reads the private `_workflow`, so
Snakemake's version is pinned and tests check what this module finds.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerotrain.config.command_options import MAIN_CONFIG
from zerotrain.pipeline.job_files import RULE as PREPARING
from zerotrain.pipeline.job_files import unwatched
from zerotrain.pipeline.snakemake import config_option

LOOKING = False
"""Whether the graph is only read; if so, the Snakefile records nothing."""


@contextlib.contextmanager
def workflow_of(
    config: Path,
    *,
    targets: Collection[str] = ("train",),
    forceall: bool = False,
    as_run: bool = False,
) -> Iterator[Any]:
    """Yield Snakemake's workflow object with the graph of the targets; run and lock nothing.

    Args:
        config: The run's configuration.
        targets: Rules and files.
        forceall: Make every job one that has to run; otherwise Snakemake decides for each.
        as_run: Plan interrupted jobs again, as `snakemake` does by profiles/default.
    """
    from snakemake.api import (
        ConfigSettings,
        DAGSettings,
        ExecutionSettings,
        OutputSettings,
        ResourceSettings,
        SnakemakeApi,
    )
    from snakemake.settings.enums import Quietness

    global LOOKING
    LOOKING = True
    output = OutputSettings(quiet={Quietness.ALL}, enable_file_logging=False)
    with SnakemakeApi(output) as api:
        interface = api.workflow(
            resource_settings=ResourceSettings(cores=1),
            config_settings=ConfigSettings(configfiles=[config]),
            snakefile=Path("Snakefile"),
        )
        # As in profiles/default: files of any size are compared by content.
        interface.dag(
            DAGSettings(
                targets={*targets},
                forceall=forceall,
                force_incomplete=as_run,
                max_checksum_file_size=10**12,
            )
        )
        workflow: Any = interface._workflow
        workflow.execution_settings = ExecutionSettings()
        workflow._prepare_dag(
            forceall=forceall, ignore_incomplete=not as_run, lock_warn_only=True, nolock=True
        )
        workflow._build_dag()
        yield workflow


def in_order(jobs: Any) -> list[Any]:
    """Sort the jobs that make files in dependency order."""
    waiting = sorted(
        (job for job in jobs if job.output), key=lambda job: (job.rule.name, str(job.wildcards))
    )
    ordered: list[Any] = []
    while waiting:
        made = {str(path) for job in waiting for path in job.output}
        ready = [job for job in waiting if not made & set(map(str, job.input))]
        ordered += ready
        waiting = [job for job in waiting if job not in ready]
    return ordered


def stage_name(job: Any) -> str:
    """Return the name of a job's stage in dvc.yaml: the rule, and the phase, or size and range."""
    named = ("phase", "size", "shard")
    own = [job.wildcards[key] for key in named if key in job.wildcards.keys()]  # noqa: SIM118
    return "-".join([job.rule.name, *own])


def stage_command(job: Any, config: Path) -> str:
    """Return the command that runs only this job, whatever Snakemake's metadata says.

    DVC calls it when an input file or value has changed; before, DVC removes the job's outputs,
    except for persistent ones. The dataset of a preset is no dependency of its stage, so it may not
    be prepared yet.
    """
    rules = [job.rule.name, *([PREPARING] if unwatched(job) else [])]
    words = ["snakemake", "--cores", "all", *config_option(config), "--force", "--allowed-rules"]
    return shlex.join([*words, *rules, "--", *map(str, job.output)])


def config_of(command: str) -> Path | None:
    """Return the configuration that a stage's command names; None if it does not call Snakemake."""
    words = words_of(command)
    if words[:1] != ["snakemake"]:
        return None
    chosen = [after for word, after in pairwise(words) if word == "--configfile"]
    return Path(chosen[0]) if chosen else MAIN_CONFIG


def words_of(command: str) -> list[str]:
    """Split a stage's command; no words if a quote is open."""
    try:
        return shlex.split(command)
    except ValueError:
        return []
