"""The message about a job that the cluster does not take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zerotrain.errors import PipelineError

REFUSED = re.compile(r"SLURM sbatch failed\. The error message was '(.*?)'\.(?:\n|$)", re.DOTALL)
"""The Slurm executor's message, which the whole call of sbatch follows."""
ASKED = (
    *("slurm_partition", "slurm_account", "nodes", "tasks", "gres", "gpu", "cpus_per_task"),
    *("mem_mb", "mem_mb_per_cpu", "runtime", "constraint", "slurm_extra"),
)
"""Resources that become options of sbatch."""


def describe_refusal(cause: str, rule: str, resources: Mapping[str, Any]) -> str | None:
    """Describe why a job was not submitted.

    Args:
        cause: The executor's message.
        rule: The rule of the job.
        resources: The job's resources.

    Returns:
        The sentences with what Slurm said and what the job asks for; None for another cause.
    """
    found = REFUSED.search(cause)
    if found is None:
        return None
    said = "; ".join(
        line.removeprefix("sbatch: error: ").strip() for line in found[1].splitlines() if line
    )
    asks = ", ".join(f"{name}={resources[name]}" for name in ASKED if resources.get(name))
    return str(
        PipelineError(
            f"{rule}: Slurm refuses the job: {said}. It asks for {asks or 'nothing of its own'}",
            hint=f"give values that a node has: `set-resources: {rule}:` of the profile, or "
            f"`--set-resources {rule}:NAME=VALUE`; `zerotrain cluster check` lists the nodes. Jobs "
            "that run continue",
        )
    )
