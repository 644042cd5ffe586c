"""Why Snakemake runs a job, in a few words: how its folders differ from their recipe, or after
which jobs it runs.

Snakemake's `Reason` contains sets of files and the names of its triggers. Its text lists every
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerotrain.artifact.damage import MANIFEST
from zerotrain.config.suggestions import join_first
from zerotrain.graph.currency import Currency
from zerotrain.graph.terminal.differences import describe, name_files

NEW = "not made yet"
JOBS_SHOWN = 2
LAUNCH, TRAINING = "render_launch", "train_phase"


class Reasons:
    """Why the jobs of a plan run.

    Args:
        found: What was found of each artifact before Snakemake planned.
    """

    def __init__(self, found: Sequence[Currency]) -> None:
        self._found = {str(path): one for one in found for path in one.planned.outputs}

    def of(self, job: Any) -> Currency | None:
        """Return what was found of a job's artifact; None for a target, which only names files."""
        return self._found.get(str(next(iter(job.output), "")))

    def name(self, job: Any) -> str:
        """Name a job as `train_phase RUN/PHASE`, `cache_latents DATA 512` or `report RUN`."""
        found = self.of(job)
        return found.planned.name if found else job.rule.name

    def describe(self, job: Any, dag: Any) -> str:
        """Describe why a job runs."""
        reason, found = dag.reason(job), self.of(job)
        if found is None:
            return ""
        if found.missing:
            return "; ".join(self._launch(job, dag)) or NEW
        parts = describe(found)
        missing = {str(path) for path in reason.missing_output}
        if missing - {str(folder / MANIFEST) for folder in found.planned.folders}:
            parts.append(f"missing: {name_files(missing)}")
        if parts:
            return "; ".join(parts)
        if reason.forced:
            return "forced, or interrupted before"
        after = self._launch(job, dag) or self._after(job, dag)
        if after:
            return "; ".join(after)
        return "its rule was edited" if reason.code_changed else "its inputs changed"

    def _launch(self, job: Any, dag: Any) -> list[str]:
        """List the values for which a training's launch files are rendered again."""
        if job.rule.name != TRAINING:
            return []
        launches = (self.of(one) for one in dag.dependencies[job] if one.rule.name == LAUNCH)
        return next((describe(one) for one in launches if one and one.differences), [])

    def _after(self, job: Any, dag: Any) -> list[str]:
        """Return the last of its running predecessors."""
        updated = dag.reason(job).updated_input_run
        before = {one for one, files in dag.dependencies[job].items() if files & updated}
        last = before - {earlier for one in before for earlier in _ancestors(one, dag)}
        names = sorted(map(self.name, last))
        return [f"after {join_first(names, JOBS_SHOWN)}"] if names else []


def made_by(job: Any) -> str:
    """List a job's outputs, with a folder for its manifest."""
    made = (str(Path(path).parent if Path(path).name == MANIFEST else path) for path in job.output)
    return ", ".join(dict.fromkeys(made))


def is_stage(rule: Any) -> bool:
    """Return whether a rule runs a command; a target only names files."""
    return not rule.norun


def _ancestors(job: Any, dag: Any) -> set[Any]:
    found: set[Any] = set()
    waiting = list(dag.dependencies[job])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += dag.dependencies[one]
    return found
