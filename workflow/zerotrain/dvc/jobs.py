"""The jobs of `snakemake train`, as Snakemake sees them.

Snakemake's interface shows the graph only as text; the objects lie behind its private `_workflow`,
so Snakemake is pinned and tests hold this module to what it finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAIN_CONFIG = Path("config/config.yaml")
"""What the Snakefile reads where no file is named."""

LOOKING = False
"""Whether the graph is only looked at: then its Snakefile keeps no books."""


@contextlib.contextmanager
def workflow_of(config: Path, *, forceall: bool = False) -> Iterator[Any]:
    """Snakemake's workflow object with the graph of `train`, nothing run and nothing locked.

    Args:
        config: The run's configuration.
        forceall: Let every job be one that has to run; else Snakemake judges each.
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
    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        interface = api.workflow(
            resource_settings=ResourceSettings(cores=1),
            config_settings=ConfigSettings(configfiles=[config]),
            snakefile=Path("Snakefile"),
        )
        # As profiles/default has it: files of any size are compared by content.
        interface.dag(
            DAGSettings(targets={"train"}, forceall=forceall, max_checksum_file_size=10**12)
        )
        workflow: Any = interface._workflow
        workflow.execution_settings = ExecutionSettings()
        workflow._prepare_dag(
            forceall=forceall, ignore_incomplete=True, lock_warn_only=True, nolock=True
        )
        workflow._build_dag()
        yield workflow


def in_order(jobs: Any) -> list[Any]:
    """The jobs that make files, each after those whose files it takes in."""
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
    """The name of a job's stage in dvc.yaml: its rule's, and its phase or size."""
    own = [job.wildcards[key] for key in ("phase", "size") if key in job.wildcards.keys()]  # noqa: SIM118
    return "-".join([job.rule.name, *own])


def stage_command(job: Any, config: Path) -> str:
    """What DVC calls for a job: this job and no other, whatever Snakemake's records say of it.

    DVC calls it when a file or a value behind it has changed, and has removed what it makes, but
    for what persists.
    """
    chosen = "" if config == MAIN_CONFIG else f" --configfile {config}"
    outputs = " ".join(map(str, job.output))
    return f"snakemake --cores all{chosen} --force --allowed-rules {job.rule.name} -- {outputs}"
