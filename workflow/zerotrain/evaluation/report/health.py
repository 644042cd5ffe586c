"""Is it healthy: losses, gradient norm and learning rate, with every switch and its jump."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zerotrain.evaluation.curves import format_learning_rate
from zerotrain.evaluation.history import JUMP_LINES, NOISE, Jump, RunHistory, Switch
from zerotrain.evaluation.report.facts import RunFacts
from zerotrain.evaluation.report.figures import Curve, draw_curves
from zerotrain.evaluation.report.parts import Chapter, Missing, Panel, Table
from zerotrain.evaluation.results import spread

MOST_LINES = 150
"""Lines of the log that the table of numbers lists."""
NUMBERS = ("loss", "val_loss", "val_loss_ema", "grad_norm", "learning_rate")
SMOOTHED_LINES = 20
"""Lines of the log from which a running mean is drawn."""


def check_health(facts: RunFacts) -> Chapter:
    """Return the chapter about the run's curves and switches."""
    history, missing = facts.history, Missing()
    panels: list[Panel] = []
    if history.steps:
        panels += [_losses(facts), *_gradient(facts, missing), _rates(facts)]
        panels += [*_switches(facts, missing), *_numbers(history)]
    else:
        missing.note("No log was found (metrics.jsonl), so there are no curves.")
    return Chapter("healthy", "Is it healthy?", [*panels, *_exactness(facts)], missing.sentences)


def change_steps(facts: RunFacts) -> list[int]:
    """Return the steps after which what a phase runs on changed."""
    return sorted({int(row[1].replace(",", "")) for row in _changes(facts)})


def points(history: RunHistory, key: str) -> list[tuple[int, float]]:
    """Return step and value of each line that has a number under a key."""
    return [(step, value) for _, step, value in history.series(key)]


def _losses(facts: RunFacts) -> Panel:
    history = facts.history
    training = points(history, "loss")
    curves = [Curve("training loss", training, smooth=len(training) > SMOOTHED_LINES)]
    names = {"val_loss": "validation loss", "val_loss_ema": "validation loss (EMA)"}
    for key, label in names.items():
        if found := points(history, key):
            curves.append(Curve(label, found, dots=True))
    text = []
    for span in history.spans:
        losses = [value for name, _, value in history.series("loss") if name == span.phase]
        if losses:
            skipped = sum(int(line.get("skipped", 0)) for line in history.of_phase(span.phase))
            text.append(
                f"{span.phase}, steps {span.first + 1:,} to {span.last:,}: training loss "
                f"{losses[0]:.4g} in the first line of the log, {losses[-1]:.4g} in the last"
                + (f"; {skipped:,} updates were skipped." if skipped else ".")
            )
    validated = points(history, "val_loss_ema") or points(history, "val_loss")
    if validated:
        step, best = min(validated, key=lambda point: point[1])
        text.append(f"The lowest validation loss is {best:.4g}, at step {step:,}.")
    else:
        text.append("It was not validated while it trained (no section `validation`).")
    alt = "Loss over the steps of all phases"
    picture = draw_curves(alt, "loss", curves, history.spans, change_steps(facts))
    return Panel("Loss", text, picture)


def _switches(facts: RunFacts, missing: Missing) -> Iterator[Panel]:
    switches = facts.history.switches
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


def _gradient(facts: RunFacts, missing: Missing) -> Iterator[Panel]:
    history = facts.history
    norms = points(history, "grad_norm")
    if not norms:
        missing.note("The log has no gradient norm.")
        return
    step, largest = max(norms, key=lambda point: point[1])
    text = [
        f"Before clipping. The largest mean of a line of the log is {largest:.4g}, at step "
        f"{step:,}."
    ]
    clipped = {p.launch.train.max_grad_norm for p in facts.phases if p.launch}
    if clipped:
        text.append(f"Clipped at {', '.join(f'{value:g}' for value in sorted(clipped))}.")
    curve = Curve("gradient norm", norms, smooth=len(norms) > SMOOTHED_LINES)
    alt = "Gradient norm over the steps of all phases"
    picture = draw_curves(
        alt, "gradient norm", [curve], history.spans, change_steps(facts), bottom=0
    )
    yield Panel("Gradient norm", text, picture)


def _rates(facts: RunFacts) -> Panel:
    history = facts.history
    rates = points(history, "learning_rate")
    text = []
    for phase in facts.phases:
        own = [rate for name, _, rate in history.series("learning_rate") if name == phase.name]
        if own:
            schedule = f" ({phase.launch.train.lr_scheduler})" if phase.launch else ""
            least, most = format_learning_rate(min(own)), format_learning_rate(max(own))
            span = least if least == most else f"{least} to {most}"
            text.append(f"{phase.name}: {span}{schedule}.")
    curve = Curve("learning rate", rates)
    alt = "Learning rate over the steps of all phases"
    picture = draw_curves(
        alt, "learning rate", [curve], history.spans, change_steps(facts), rates=True, bottom=0
    )
    return Panel("Learning rate", text, picture)


def _numbers(history: RunHistory) -> Iterator[Panel]:
    lines = [line for line in history.lines if any(key in line for key in NUMBERS)]
    keys = [key for key in NUMBERS if any(key in line for line in lines)]
    shown = spread(lines, MOST_LINES)
    rows = [
        [str(line["phase"]), f"{line['step']}", *(_number(line.get(key)) for key in keys)]
        for line in shown
    ]
    if len(shown) == len(lines):
        text = f"All {len(lines):,} lines of the log."
    else:
        text = f"{len(shown)} of the {len(lines):,} lines of the log, evenly spread."
    table = Table(rows, ["phase", "step", *keys], numbers=True)
    yield Panel("The numbers of these curves", [text], table=table, shown=False)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else ""


def _exactness(facts: RunFacts) -> Iterator[Panel]:
    exact = [(phase.name, phase.ran_on.exact) for phase in facts.phases if phase.ran_on]
    if exact:
        table = Table(exact, ["phase", "steps that are exact"])
        text = "Steps that give the same bits if they are trained again."
        yield Panel("Exactness", [text], table=table)
    if changes := _changes(facts):
        table = Table(changes, ["phase", "after step", "what", "before", "after"])
        yield Panel("Changed while it trained", ["Dotted lines in the figures."], table=table)


def _changes(facts: RunFacts) -> list[tuple[str, ...]]:
    """Return every change of what a phase ran on, with the phase that continued after it."""
    changes: list[tuple[str, ...]] = []
    before = -1
    for phase in facts.phases:
        if one := phase.ran_on:
            found = [c for c in one.changes if before <= c.step < one.step]
            changes += [(phase.name, f"{c.step:,}", c.what, *c.values) for c in found]
            before = one.step
    return changes
