"""`zerotrain why`: plans as `snakemake -n` does, and explains the plan."""

from __future__ import annotations

from pathlib import Path

from zerotrain.config.runs import read_runs
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError
from zerotrain.pipeline.dvc.jobs import workflow_of
from zerotrain.pipeline.snakemake import DEFAULT_CONFIG
from zerotrain.pipeline.why import report
from zerotrain.pipeline.why.causes import find_causes
from zerotrain.pipeline.why.outcomes import Outcomes

RULES = "dataset", "base", "cache", "launch", "checkpoints", "weights", "evaluation", "train"
"""The rules that are targets only (rules/targets.smk)."""


def why(target: str | None, config: Path | None, *, json: bool = False) -> str:
    """Explain what would run.

    Args:
        target: A rule, a file of the results or a phase; None: everything.
        config: The run's configuration, or a sweep's.
        json: Whether to answer with JSON.

    Raises:
        PipelineError: there is no such target, or Snakemake cannot plan.
    """
    from snakemake.exceptions import MissingRuleException, WorkflowError

    file = config or DEFAULT_CONFIG
    try:
        with workflow_of(file, targets=targets_of(target, file), as_run=True) as workflow:
            plan = find_causes(workflow.dag)
            answer = report.document if json else report.text
            return answer(plan, Outcomes(plan, workflow.dag))
    except MissingRuleException as error:
        names = [phase.name for run in read_runs(file).values() for phase in run.phases]
        raise PipelineError(
            f"{target}: neither a rule nor a file that a rule makes, nor a phase",
            hint=known_names(str(target), [*RULES, *names], "targets"),
        ) from error
    except WorkflowError as error:
        raise PipelineError(
            f"snakemake cannot plan it: {error}", hint="fix it, and run this again"
        ) from error


def targets_of(target: str | None, config: Path) -> list[str]:
    """Return Snakemake's targets; for a phase, as PHASE or RUN/PHASE, they are its results."""
    if target is None:
        return ["train"]
    found = [
        f"results/{run.run}/{phase.name}/{name}"
        for run in read_runs(config).values()
        for phase in run.phases
        if target in (phase.name, f"{run.run}/{phase.name}", f"results/{run.run}/{phase.name}")
        for name in ("weights/manifest.json", "state/manifest.json", "metrics.json")
    ]
    folder = Path(target) / "manifest.json"
    return found or [str(folder) if folder.is_file() else target]
