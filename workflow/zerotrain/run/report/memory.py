"""Memory of each training process over the steps, host and device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zerotrain.run.curves import Curves
from zerotrain.run.report.figures import MOST_NAMED, Chart, Curve, draw_curves
from zerotrain.run.report.health import change_steps
from zerotrain.run.report.parts import Missing, Panel, Table
from zerotrain.run.view import RunView
from zerotrain.training.reporting.log_lines import Line

KINDS = {
    "host": "Host memory: resident, with libraries.",
    "device": "Device memory: that of tensors.",
}
GIB = 2**30


def memory_panels(view: RunView, missing: Missing) -> Iterator[Panel]:
    """Yield a panel for each kind of memory that the log has: a line for each process."""
    panels = [panel for kind in KINDS for panel in _panel(view, kind)]
    if not panels:
        missing.note("The log has no memory.")
    yield from panels


def memory_of_ranks(line: Line, kind: str) -> Sequence[object]:
    """Return the bytes of each process in a line of the log, by rank; of the first if the line
    has no others."""
    of_all = line.get(f"{kind}_bytes_by_rank")
    return of_all if isinstance(of_all, list) and of_all else [line.get(f"{kind}_bytes")]


def _panel(view: RunView, kind: str) -> Iterator[Panel]:
    log = view.curves
    ranks = _points(log, kind)
    if not any(value for points in ranks.values() for _, value in points):
        return
    named = len(ranks) <= MOST_NAMED
    curves = [Curve(f"rank {rank}" if named else "", points) for rank, points in ranks.items()]
    of = f"the {len(ranks)} processes" if len(ranks) > 1 else "the first process"
    alt = f"{kind.capitalize()} memory of {of} over the steps of all phases"
    picture = draw_curves(alt, Chart("GiB", curves, bottom=0), log.spans, change_steps(view))
    text = [KINDS[kind], *_describe(ranks)]
    rows = [
        [f"rank {rank}", *_most(points), f"{points[-1][1]:.2f} GiB"]
        for rank, points in ranks.items()
    ]
    table = Table(rows, ["", "at most", "at step", "in its last line"], numbers=True)
    yield Panel(f"{kind.capitalize()} memory", text, picture, table if len(ranks) > 1 else None)


def _points(log: Curves, kind: str) -> dict[int, list[tuple[int, float]]]:
    """Return step and GiB of the lines of each process, by rank."""
    ranks: dict[int, list[tuple[int, float]]] = {}
    for line in log.steps:
        for rank, value in enumerate(memory_of_ranks(line, kind)):
            if isinstance(value, int):
                ranks.setdefault(rank, []).append((line["step"], value / GIB))
    return dict(sorted(ranks.items()))


def _describe(ranks: Mapping[int, list[tuple[int, float]]]) -> Iterator[str]:
    peaks = {rank: max(value for _, value in points) for rank, points in ranks.items()}
    highest, lowest = max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)
    size, step = _most(ranks[highest])
    if len(ranks) == 1:
        yield f"The first process has at most {size}, at step {step}."
        return
    yield (
        f"Rank {highest} has the most: {size}, at step {step}. Rank {lowest} has at most "
        f"{_most(ranks[lowest])[0]}."
    )
    if len(ranks) > MOST_NAMED:
        yield f"The lines of more than {MOST_NAMED} processes are not named; the table lists them."


def _most(points: Sequence[tuple[int, float]]) -> list[str]:
    step, value = max(points, key=lambda point: point[1])
    return [f"{value:.2f} GiB", f"{step:,}"]
