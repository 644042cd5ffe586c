"""`zerotrain why` plans as `snakemake -n` does, and explains the plan, as text or as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import RESULTS, runs_here
from zerotrain.config.command_options import MAIN_CONFIG
from zerotrain.config.runs import find_config, read_runs
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError
from zerotrain.machine.disk import size
from zerotrain.pipeline.dvc.jobs import workflow_of
from zerotrain.pipeline.why.causes import Plan, find_causes
from zerotrain.pipeline.why.outcomes import Outcome, Outcomes
from zerotrain.pipeline.why.samples import count, name_some
from zerotrain.training.reporting.display import format_duration

SHOWN_BYTES = 100_000
NOTHING = "nothing would run: everything is made from what is there now"
RULES = "dataset", "base", "cache", "launch", "checkpoints", "weights", "evaluation", "train"
"""The rules that are targets only (rules/targets.smk)."""


def split_words(words: Sequence[str]) -> tuple[Path, str | None]:
    """Return the configuration and the target that the words after `zerotrain why` name.

    A target of results/RUN, and RUN/PHASE, name the run themselves; any other without a run is of
    the default configuration.

    Raises:
        PipelineError: no file has the run, or there are more words.
    """
    if len(words) > 2:
        raise PipelineError(
            f"why: {' '.join(words)}: more than a run and a target",
            hint="zerotrain why RUN TARGET; both may be left out",
        )
    if len(words) == 2:
        return find_config(words[0]), words[1]
    if not words:
        return MAIN_CONFIG, None
    (word,) = words
    parts = Path(word).parts
    if is_below := parts[:1] == RESULTS.parts:
        parts = parts[1:]
    if parts[:1] and parts[0] in runs_here().values():
        return find_config(parts[0]), word if len(parts) > 1 else None
    if Path(word).suffix in (".yaml", ".yml") and not is_below:
        return find_config(word), None
    return MAIN_CONFIG, word


def why(config: Path, target: str | None, *, as_json: bool = False) -> str:
    """Explain what would run.

    Args:
        config: The run's configuration, or a sweep's.
        target: A rule, a file of the results or a phase; None: everything.
        as_json: Whether to answer with JSON.

    Raises:
        PipelineError: there is no such target, or Snakemake cannot plan.
    """
    from snakemake.exceptions import MissingRuleException, WorkflowError

    try:
        with workflow_of(config, targets=targets_of(target, config), as_run=True) as workflow:
            plan = find_causes(workflow.dag)
            answer = document if as_json else text
            return answer(plan, Outcomes(plan, workflow.dag))
    except MissingRuleException as error:
        names = [phase.name for run in read_runs(config).values() for phase in run.phases]
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


def text(plan: Plan, outcomes: Outcomes) -> str:
    """Return the causes, each with the jobs that follow from it, and what they cost together."""
    if not plan.jobs:
        return NOTHING + "\n"
    lines: list[str] = []
    shown: set[Any] = set()
    for cause in plan.causes:
        lines.append(cause.text)
        new = [job for job in cause.followers if job not in shown]
        lines += [f"  {_describe(outcomes.of(job))}" for job in new]
        if again := len(cause.followers) - len(new):
            lines.append(f"  and {count(again, 'stage')} named above")
        shown.update(new)
    return "\n".join([*lines, *_totals([*outcomes])]) + "\n"


def document(plan: Plan, outcomes: Outcomes) -> str:
    """Return the same as one JSON object. Unknown seconds and bytes are null."""
    every = [*outcomes]
    found = {
        "causes": [
            {
                "kind": cause.kind,
                "text": cause.text,
                "stages": [outcomes.of(job).name for job in cause.followers],
            }
            for cause in plan.causes
        ],
        "stages": [
            {
                "stage": one.name,
                "rule": one.job.rule.name,
                "what": one.what,
                "seconds": one.seconds,
                "forecast": one.forecast,
                "bytes": one.bytes,
                "encodes": asdict(one.encodes) if one.encodes else None,
            }
            for one in every
        ],
        "samples": {
            str(Path(manifest).parent): {
                kind: getattr(changes, kind)
                for kind in ("images", "captions", "added", "removed", "renamed")
            }
            | {"unusable": [asdict(one) for one in changes.unusable]}
            for manifest, changes in plan.samples.items()
        },
        "seconds": sum(one.seconds or 0 for one in every),
        "bytes": sum(one.bytes or 0 for one in every),
        "unknown_seconds": [one.name for one in every if one.seconds is None],
        "unknown_bytes": [one.name for one in every if one.bytes is None],
        "free_bytes": _free(),
    }
    return json.dumps(found, indent=1) + "\n"


def _describe(outcome: Outcome) -> str:
    parts = [outcome.what] if outcome.what else []
    if outcome.seconds is None:
        parts.append("time unknown")
    elif outcome.seconds >= 0.5:
        forecast = " by the planner's forecast" if outcome.forecast else ""
        parts.append(f"about {format_duration(outcome.seconds + 0.5)}{forecast}")
    return outcome.name + (f": {', '.join(parts)}" if parts else "")


def _totals(outcomes: list[Outcome]) -> list[str]:
    """Say how many stages there are, how long they take and what they write."""
    stages = f"{count(len(outcomes), 'stage')} would run"
    seconds = [one.seconds for one in outcomes if one.seconds is not None]
    unknown = len(outcomes) - len(seconds)
    if not seconds:
        time = "in an unknown time: no earlier stage tells it"
    else:
        time = f"in about {format_duration(sum(seconds) + 0.5)}, as earlier ones took"
        if any(one.forecast for one in outcomes):
            time = time.replace("as earlier ones took", "as earlier ones took or are forecast")
        time += f", and {count(unknown, 'stage')} of unknown time" if unknown else ""
    known = sum(one.bytes or 0 for one in outcomes)
    unsized = [one.name for one in outcomes if one.bytes is None]
    disk = f"about {size(known)}" if known >= SHOWN_BYTES else "less than 0.1 MB"
    if unsized:
        others = f"what {name_some(unsized)} write{'s' * (len(unsized) == 1)}, of unknown size"
        disk = f"{disk} and {others}" if known >= SHOWN_BYTES else others
    return [f"{stages} {time}", f"on disk: {disk}; {size(_free())} are free"]


def _free() -> int:
    """Return the free bytes of the disk with the results."""
    return shutil.disk_usage(RESULTS if RESULTS.is_dir() else Path()).free
