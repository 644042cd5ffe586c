"""The version of a job's stage, as a parameter of the job: a raised number reruns it.

Snakemake records it among the other parameters, which have no names there.
"""

from __future__ import annotations

import re
from typing import Any

from zerotrain.artifact.stage_versions import VERSIONS

PARAMETER = "version"
RECORDED = re.compile(rf"'{PARAMETER} (\d+) of \w+'")
"""The parameter as Snakemake records it."""


def version_of(stage: str) -> str:
    """Return the parameter of a stage's jobs."""
    return f"{PARAMETER} {VERSIONS[stage]} of {stage}"


def is_version(recorded: str) -> bool:
    """Return whether a recorded parameter, as its `repr`, is the version of a stage."""
    return RECORDED.fullmatch(recorded) is not None


def stage_of(job: Any) -> str | None:
    """Return the stage whose version a job depends on; None if it depends on none."""
    if PARAMETER not in job.params.keys():  # noqa: SIM118
        return None
    return str(job.params[PARAMETER].split()[-1])


def version_change(persistence: Any, job: Any) -> tuple[int | None, int] | None:
    """Return the version that made a job's outputs, if it is another one, and the present one.

    Args:
        persistence: Snakemake's records.
        job: A job of the graph.

    Returns:
        None without a change; an unknown version is None.
    """
    if stage_of(job) is None:
        return None
    now = int(job.params[PARAMETER].split()[1])
    records = [path for path in job.output if persistence.metadata(path)]
    found = [_recorded(persistence, path) for path in records]
    return next(((one, now) for one in found if one != now), None)


def _recorded(persistence: Any, output: Any) -> int | None:
    for value in persistence.params(output) or ():
        if match := RECORDED.fullmatch(value):
            return int(match[1])
    return None
