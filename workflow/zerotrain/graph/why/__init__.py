"""`zerotrain why`: what would run, why, and what it costs; it changes no result.

`snakemake -n` begins with the causes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotrain.graph.currency import Currency

MOST = 8
"""Causes that are shown."""
MARK = "why: "
FORCED = "asked for by --force, --forceall or --forcerun, or interrupted before"


def first_lines(dag: Any, found: Sequence[Currency]) -> list[str]:
    """Return the causes of Snakemake's plan, at most nine lines, found in a moment.

    Args:
        dag: Snakemake's graph.
        found: What was found of each artifact, in the order of the graph.
    """
    # Only a dry run needs these modules, of all calls that read the Snakefile.
    from zerotrain.graph.why.causes import find_causes

    jobs = {str(path): job for job in dag.needrun_jobs() for path in job.output}
    running = [one for one in found if str(one.planned.outputs[0]) in jobs]
    nothing_made = len(running) == sum(bool(job.output) for job in dag.jobs)
    texts = [one.text for one in find_causes(running, nothing_made=nothing_made, quick=True).every]
    reasons = [(one, dag.reason(jobs[str(one.planned.outputs[0])])) for one in running]
    if any(reason.forced for _, reason in reasons):
        texts.append(FORCED)
    edited = {one.planned.rule for one, reason in reasons if reason.code_changed}
    texts += [f"{rule}: its rule was edited" for rule in sorted(edited)]
    more = len(texts) - MOST
    rest = [f"{more:,} more; `zerotrain why` names them"] if more > 0 else []
    return [f"{MARK}{text}" for text in [*texts[:MOST], *rest]]
