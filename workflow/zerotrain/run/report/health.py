"""Is it healthy: losses, gradient norm and learning rate, with every switch and its jump."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zerotrain.evaluation.results import spread
from zerotrain.run.curves import JUMP_LINES, NOISE, Curves, Jump, Switch
from zerotrain.run.report.figures import (
    SMOOTHED_LINES,
    Chapter,
    Chart,
    Curve,
    Missing,
    Panel,
    Table,
    draw_curves,
    format_learning_rate,
    loss_chart,
    rate_chart,
)
from zerotrain.run.view import RunView
from zerotrain.state.ran_on import Change

MOST_LINES = 150
"""Lines of the log that the table of numbers lists."""
VALIDATIONS = {"val_loss": "validation loss", "val_loss_ema": "validation loss (EMA)"}
"""Labels of the losses of a validation, by their keys in the log."""
NUMBERS = ("loss", "val_loss", "val_loss_ema", "grad_norm", "learning_rate")


def check_health(view: RunView) -> Chapter:
    """Return the chapter about the run's curves and switches."""
    log, missing = view.curves, Missing()
    panels: list[Panel] = []
    if log.steps:
        panels += [_losses(view), *_gradient(view, missing), _rates(view)]
        panels += [*_switches(view, missing), *_numbers(log)]
    else:
        missing.note("No log was found (metrics.jsonl), so there are no curves.")
    return Chapter("healthy", "Is it healthy?", [*panels, *_exactness(view)], missing.sentences)


def change_steps(view: RunView) -> list[int]:
    """Return the steps after which what a phase runs on changed."""
    return sorted({change.step for _, change in _changes(view)})


def _losses(view: RunView) -> Panel:
    log = view.curves
    curves = [*loss_chart(log).curves]
    for key, label in VALIDATIONS.items():
        if found := log.series(key):
            curves.append(Curve(label, found, dots=True))
    text = []
    for span in log.spans:
        losses = [value for _, value in log.series("loss", span.phase)]
        if losses:
            skipped = sum(int(line.get("skipped", 0)) for line in log.of_phase(span.phase))
            text.append(
                f"{span.phase}, steps {span.first + 1:,} to {span.last:,}: training loss "
                f"{losses[0]:.4g} in the first line of the log, {losses[-1]:.4g} in the last"
                + (f"; {skipped:,} updates were skipped." if skipped else ".")
            )
    validated = log.series("val_loss_ema") or log.series("val_loss")
    if validated:
        step, best = min(validated, key=lambda point: point[1])
        text.append(f"The lowest validation loss is {best:.4g}, at step {step:,}.")
    else:
        text.append("It was not validated while it trained (no section `validation`).")
    alt = "Loss over the steps of all phases"
    picture = draw_curves(alt, Chart("loss", curves), log.spans, change_steps(view))
    return Panel("Loss", text, picture)


def _switches(view: RunView, missing: Missing) -> Iterator[Panel]:
    switches = view.curves.switches
    if not switches:
        missing.note("The log has one phase, so there is no switch.")
        return
    head = ["switch", "after step", "changed", "mean before", "mean after", "jump", "verdict"]
    text = [
        f"The means are over up to {JUMP_LINES} lines of the log on each side, ± their standard "
        "deviation. The jump, ± its standard error, is the distance at the switch between "
        "straight lines through both sides, so a loss that falls evenly does not count. Within "
        f"{NOISE:g} standard errors it is noise."
    ]
    rows = [_switch_row(switch) for switch in switches]
    yield Panel("Switches", text, table=Table(rows, head))


def _switch_row(switch: Switch) -> list[str]:
    changed = [f"{key} {_word(old)} → {_word(new)}" for key, (old, new) in switch.changes.items()]
    name = f"{switch.before} → {switch.after}"
    row = [name, f"{switch.step:,}", ", ".join(changed) or "nothing that is recorded"]
    if switch.jump is None:
        return [*row, "", "", "", "no loss on one side"]
    jump = switch.jump
    return [
        *row,
        _plus_minus(jump.before.mean, jump.before.spread),
        _plus_minus(jump.after.mean, jump.after.spread),
        _plus_minus(jump.size, jump.error, sign="+"),
        describe_verdict(jump),
    ]


def describe_verdict(jump: Jump) -> str:
    """Return in words what explains a change of the loss."""
    if jump.verdict == "too few lines":
        return f"too few lines to say: {jump.before.lines} before, {jump.after.lines} after"
    if jump.verdict == "noise":
        return "noise"
    times = f"{abs(jump.size) / jump.error:.1f}" if jump.error else "many"
    return f"a jump of {times} standard errors"


def _plus_minus(value: float, spread: float, sign: str = "") -> str:
    if math.isnan(value):
        return ""
    shown = f"{value:{sign}.4g}"
    return shown if math.isnan(spread) else f"{shown} ± {spread:.2g}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gradient(view: RunView, missing: Missing) -> Iterator[Panel]:
    log = view.curves
    norms = log.series("grad_norm")
    if not norms:
        missing.note("The log has no gradient norm.")
        return
    step, largest = max(norms, key=lambda point: point[1])
    text = [
        f"Before clipping. The largest mean of a line of the log is {largest:.4g}, at step "
        f"{step:,}."
    ]
    clipped = {p.launch.train.max_grad_norm for p in view.started if p.launch}
    if clipped:
        text.append(f"Clipped at {', '.join(f'{value:g}' for value in sorted(clipped))}.")
    curve = Curve("gradient norm", norms, smooth=len(norms) > SMOOTHED_LINES)
    alt = "Gradient norm over the steps of all phases"
    chart = Chart("gradient norm", [curve], bottom=0)
    picture = draw_curves(alt, chart, log.spans, change_steps(view))
    yield Panel("Gradient norm", text, picture)


def _rates(view: RunView) -> Panel:
    log = view.curves
    text = []
    for phase in view.started:
        own = [rate for _, rate in log.series("learning_rate", phase.name)]
        if own:
            schedule = f" ({phase.launch.train.lr_scheduler})" if phase.launch else ""
            least, most = format_learning_rate(min(own)), format_learning_rate(max(own))
            span = least if least == most else f"{least} to {most}"
            text.append(f"{phase.name}: {span}{schedule}.")
    alt = "Learning rate over the steps of all phases"
    picture = draw_curves(alt, rate_chart(log), log.spans, change_steps(view))
    return Panel("Learning rate", text, picture)


def _numbers(log: Curves) -> Iterator[Panel]:
    lines = [line for line in log.lines if any(key in line for key in NUMBERS)]
    keys = [key for key in NUMBERS if any(key in line for line in lines)]
    shown = spread(lines, MOST_LINES)
    rows = [
        [str(line["phase"]), f"{line['step']}", *(format_number(line.get(key)) for key in keys)]
        for line in shown
    ]
    if len(shown) == len(lines):
        text = f"All {len(lines):,} lines of the log."
    else:
        text = f"{len(shown)} of the {len(lines):,} lines of the log, evenly spread."
    table = Table(rows, ["phase", "step", *keys], numbers=True)
    yield Panel("The numbers of these curves", [text], table=table, shown=False)


def format_number(value: object) -> str:
    """Format a value of the log; empty for a missing one."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}" if isinstance(value, float) else ""


def _exactness(view: RunView) -> Iterator[Panel]:
    exact = [(phase.name, phase.ran_on.exact) for phase in view.started if phase.ran_on]
    if exact:
        table = Table(exact, ["phase", "steps that are exact"])
        text = "Steps that give the same bits if they are trained again."
        yield Panel("Exactness", [text], table=table)
    if changes := _changes(view):
        rows = [(name, f"{one.step:,}", one.what, *one.values) for name, one in changes]
        table = Table(rows, ["phase", "after step", "what", "before", "after"])
        yield Panel("Changed while it trained", ["Dotted lines in the figures."], table=table)


def _changes(view: RunView) -> list[tuple[str, Change]]:
    """Return every change of what a phase ran on, with the phase that continued after it."""
    changes: list[tuple[str, Change]] = []
    before = -1
    for phase in view.started:
        if one := phase.ran_on:
            changes += [(phase.name, c) for c in one.changes if before <= c.step < one.step]
            before = one.step
    return changes
