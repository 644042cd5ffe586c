"""The page: one HTML file without scripts that needs no other file and no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_mark_safe

from zerotrain.evaluation.results import LABELS, format_metric
from zerotrain.run.curves import Jump
from zerotrain.run.report.figures import Chapter
from zerotrain.run.report.health import describe_verdict
from zerotrain.run.report.origin import Origin
from zerotrain.run.report.samples import Samples
from zerotrain.run.view import RunView

TEMPLATE = "page.html.j2"
SHORT_METRICS = ("exact_match", "prompt_accuracy", "val_loss", "perplexity")
"""Metrics that the first lines name."""
Hide = Callable[[str], str]
"""Removes what no one else should read from a text."""


@dataclass(frozen=True)
class Page:
    """All that the page shows."""

    run: str
    summary: Sequence[tuple[str, str]]
    """Names and values of a few settings."""
    in_short: Sequence[str]
    samples: Samples
    health: Chapter
    cost: Chapter
    origin: Origin


def render_page(page: Page, hide: Hide) -> str:
    """Return the page's HTML; `hide` sees every text before it is escaped."""
    return open_templates(hide=hide).get_template(TEMPLATE).render(page=page)


def open_templates(*others: Path, hide: Hide = str) -> Environment:
    """Return the templates here, and those of other folders, which may use their macros and styles.

    Args:
        others: Folders of templates.
        hide: Sees every text before it is escaped.
    """

    def shown(value: Any) -> Any:
        is_text = isinstance(value, str) and not hasattr(value, "__html__")
        return hide(value) if is_text else value

    templates = Environment(
        loader=FileSystemLoader([*others, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=shown,
    )
    # Digits and letters only, which need no escaping, and in which nothing is to be hidden.
    templates.filters["base64"] = lambda data: do_mark_safe(b64encode(data).decode())
    return templates


def in_short(view: RunView) -> list[str]:
    """Return the sentences at the top: what was measured, and what the switches did."""
    lines = []
    for phase in view.started:
        known = [name for name in SHORT_METRICS if name in phase.metrics]
        words = [f"{LABELS[name]} {format_metric(name, phase.metrics[name])}" for name in known]
        spans = [span for span in view.curves.spans if span.phase == phase.name]
        steps = f", steps {spans[0].first + 1:,} to {spans[0].last:,}" if spans else ""
        preset = f" ({phase.launch.launch.preset})" if phase.launch else ""
        nothing = "evaluated, and nothing was measured" if phase.evaluation else "not evaluated"
        lines.append(f"Phase {phase.name}{preset}{steps}: {', '.join(words) or nothing}.")
    for switch in view.curves.switches:
        if switch.jump is not None:
            place = f"At the switch from {switch.before} to {switch.after} the training loss"
            lines.append(f"{place} {_describe_jump(switch.jump)}.")
    return lines


def _describe_jump(jump: Jump) -> str:
    size = f"{jump.size:+.2g} ± {jump.error:.2g}"
    if jump.verdict == "noise":
        return f"has no jump: {size} is noise"
    if jump.verdict == "jump":
        return f"has {describe_verdict(jump)}: {size}"
    return f"has {describe_verdict(jump)}"
