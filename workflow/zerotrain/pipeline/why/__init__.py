"""`zerotrain why`: what would run, why, and what it costs; it changes nothing.

`snakemake -n` begins with the causes, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 8
"""Causes that are shown."""
MARK = "why: "


def first_lines(dag: Any, reasons: Mapping[Any, str]) -> list[str]:
    """Return the causes of Snakemake's plan, at most nine lines, found in a moment.

    Args:
        dag: Snakemake's graph.
        reasons: Why each planned job runs, as the lines below say it.
    """
    # Only a dry run needs these modules, of all calls that read the Snakefile.
    from zerotrain.pipeline.why.causes import find_causes

    texts = [cause.text for cause in find_causes(dag, reasons).causes]
    more = len(texts) - MOST
    rest = [f"{more:,} more; `zerotrain why` names them"] if more > 0 else []
    return [f"{MARK}{text}" for text in [*texts[:MOST], *rest]]
