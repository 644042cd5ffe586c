"""What did it cost: time, memory, throughput and disk, with the planner's forecast of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from zerotrain.config.stage_settings import PlannedRun
from zerotrain.errors import PipelineError
from zerotrain.evaluation.results import compare_metrics, format_metric, spread
from zerotrain.launch.planner.planner import PlannedMachine, plan
from zerotrain.launch.planner.prediction import Prediction
from zerotrain.launch.planner.tracing import Tracer
from zerotrain.machine.host import gib
from zerotrain.machine.output import format_figure
from zerotrain.run.curves import Curves
from zerotrain.run.phase import PhaseView
from zerotrain.run.report.figures import (
    MOST_NAMED,
    Chapter,
    Chart,
    Curve,
    Missing,
    Panel,
    Table,
    draw_bars,
    draw_curves,
)
from zerotrain.run.report.health import MOST_LINES, change_steps, format_number
from zerotrain.run.report.origin import Node
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


PARTS = ("data", "forward", "backward", "optimizer", "validation", "save", "other")
"""Parts of a training's time, in the order of a step."""
LEAST_SHARE = 0.01
"""Smallest share of a folder in the run's bytes that has a bar."""


@dataclass(frozen=True)
class Taken:
    """The bytes of a folder."""

    name: str
    whole: int
    own: int
    """Bytes that no folder before it has: the rest are other names of the same files."""


def count_costs(view: RunView, nodes: Sequence[Node], forecast: Panel | str) -> Chapter:
    """Return the chapter about time, memory and disk.

    Args:
        view: The run.
        nodes: Its folders and those that it was made from.
        forecast: The planner's forecast, or a sentence that says why it is missing.
    """
    missing = Missing()
    panels = [
        *_resources(view, missing),
        *_times(view, missing),
        *memory_panels(view, missing),
        *_throughput(view, missing),
        *_disk(view, nodes, missing),
    ]
    if isinstance(forecast, str):
        missing.note(forecast)
    else:
        panels.append(forecast)
    return Chapter(
        "cost", "What did it cost?", [*panels, *_numbers(view.curves)], missing.sentences
    )


def _resources(view: RunView, missing: Missing) -> Iterator[Panel]:
    measured = [phase for phase in view.started if phase.metrics]
    split = {f"{part}_seconds" for part in PARTS}  # the next panel has them
    metrics = [{k: v for k, v in p.metrics.items() if k not in split} for p in measured]
    rows = compare_metrics(metrics, learned=False)
    if not rows:
        missing.note("No evaluation has recorded time or memory.")
        return
    head = ["", *(f"phase {phase.name}" for phase in measured)]
    yield Panel("Time and memory of each phase", table=Table(rows, head, numbers=True))


def _times(view: RunView, missing: Missing) -> Iterator[Panel]:
    timed = [phase for phase in view.started if any(_seconds(phase, part) for part in PARTS)]
    if not timed:
        missing.note("The time of the parts of a step was not recorded.")
        return
    parts = {part: [_seconds(phase, part) for phase in timed] for part in PARTS}
    parts = {part: values for part, values in parts.items() if any(values)}
    wholes = [sum(values) for values in zip(*parts.values(), strict=True)]
    rows = [
        [part, *(f"{v:.1f} s ({v / whole:.0%})" for v, whole in zip(values, wholes, strict=True))]
        for part, values in parts.items()
    ]
    rows.append(["in all", *(f"{whole:.1f} s" for whole in wholes)])
    text = [_describe_split(phase, parts, number) for number, phase in enumerate(timed)]
    alt = "Seconds of each part of the training time, for each phase"
    picture = draw_bars(alt, "seconds", [phase.name for phase in timed], parts)
    head = ["part of a step", *(f"phase {phase.name}" for phase in timed)]
    table = Table(rows, head, numbers=True)
    yield Panel("Where the time went", text, picture, table)


def _describe_split(phase: PhaseView, parts: dict[str, list[float]], number: int) -> str:
    whole = sum(values[number] for values in parts.values())
    part, most = max(((p, values[number]) for p, values in parts.items()), key=lambda one: one[1])
    return (
        f"{phase.name} trained for {format_metric('_seconds', whole)}, of which {part} "
        f"took {most / whole:.0%}."
    )


def _seconds(phase: PhaseView, part: str) -> float:
    return float(phase.costs.get(f"{part}_seconds", 0.0))


def _throughput(view: RunView, missing: Missing) -> Iterator[Panel]:
    log = view.curves
    rates = log.series("samples_per_second")
    if not rates:
        missing.note("The log has no throughput.")
        return
    text = []
    for span in log.spans:
        own = [value for _, value in log.series("samples_per_second", span.phase)]
        if own:
            middle = sorted(own)[len(own) // 2]
            text.append(
                f"{span.phase}: {format_figure(middle)} samples per second in the middle line of "
                f"the log, {format_figure(min(own))} to {format_figure(max(own))} over all lines."
            )
    chart = Chart("samples per second", [Curve("samples per second", rates)], bottom=0)
    alt = "Samples per second over the steps of all phases"
    picture = draw_curves(alt, chart, log.spans, change_steps(view))
    yield Panel("Throughput", text, picture)


def _disk(view: RunView, nodes: Sequence[Node], missing: Missing) -> Iterator[Panel]:
    folders = {node.path.as_posix(): node.path for node in nodes if node.artifact}
    for phase in view.started:
        progress = phase.places.progress
        if progress.is_dir():
            folders[progress.as_posix()] = progress
    if not folders:
        missing.note("No folder of the run is here.")
        return
    taken = measure_disk(folders)
    whole = sum(one.own for one in taken)
    text = [f"{gib(whole)} in all."]
    if any(one.own < one.whole for one in taken):
        text.append(
            "A checkpoint and the newest rolling one in progress/ are two names of the same files "
            "(hard links), which are counted once."
        )
    alt = "Bytes on disk of each folder"
    rows = [[one.name, gib(one.own), gib(one.whole)] for one in taken]
    unit, name = (GIB, "GiB") if whole >= GIB else (2**20, "MiB")
    large = [one for one in taken if one.own >= LEAST_SHARE * whole]
    bars = {"": [one.own / unit for one in large]}
    picture = draw_bars(alt, name, ["/".join(Path(one.name).parts[-2:]) for one in large], bars)
    table = Table(rows, ["folder", "adds", "size of its files"], numbers=True)
    yield Panel("Disk", text, picture, table)


def measure_disk(folders: dict[str, Path]) -> list[Taken]:
    """Return the bytes of folders by their names; a file with several names is counted once.

    A cache in a dataset's folder is not counted to the dataset.
    """
    seen: set[tuple[int, int]] = set()
    roots = set(folders.values())
    return [_measure(name, folder, roots - {folder}, seen) for name, folder in folders.items()]


def _measure(name: str, folder: Path, others: set[Path], seen: set[tuple[int, int]]) -> Taken:
    whole = own = 0
    waiting = [folder]
    while waiting:
        for path in waiting.pop().iterdir():
            if path.is_symlink():
                continue
            if path.is_dir():
                waiting += [] if path in others else [path]
                continue
            found = path.stat()
            whole += found.st_size
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                own += found.st_size
    return Taken(name, whole, own)


def _numbers(log: Curves) -> Iterator[Panel]:
    keys = [key for key in ("seconds", "samples_per_second") if log.series(key)]
    kinds = [kind for kind in KINDS if log.series(f"{kind}_bytes")]
    lines = [line for line in log.steps if "host_bytes" in line or any(k in line for k in keys)]
    if not lines:
        return
    parts = [f"seconds_{part}" for part in PARTS if log.series(f"seconds_{part}")]
    shown = spread(lines, MOST_LINES)
    rows = [
        [
            *(line["phase"], f"{line['step']}"),
            *(format_number(line.get(key)) for key in keys),
            *(" ".join(map(format_number, memory_of_ranks(line, kind))) for kind in kinds),
            *(format_number(line.get(part)) for part in parts),
        ]
        for line in shown
    ]
    text = (
        f"{len(shown):,} of the {len(lines):,} lines of the log; parts are seconds of a step, "
        "bytes those of each process by rank."
    )
    head = ["phase", "step", *keys, *(f"{kind}_bytes" for kind in kinds), *parts]
    table = Table(rows, head, numbers=True)
    yield Panel("The numbers of these curves", [text], table=table, shown=False)


UNKNOWN = (
    "There is no forecast of the planner: `zerotrain plan CONFIG --phase PHASE` makes one, which "
    "the next report shows."
)


class StoredTracer(Tracer):
    """A tracer that builds no model: it only reads what a plan has traced on this machine."""

    def _build(self) -> Any:
        raise PipelineError("no plan has been made here", hint="`zerotrain plan` makes one")


def compare_forecasts(
    view: RunView, runs: Mapping[str, PlannedRun], base: Path | None, *, trace: bool
) -> Panel | str:
    """Return the forecasts next to what was measured, or a sentence that says why they are missing.

    Args:
        view: The run.
        runs: What the planner reads of the configuration, by phase.
        base: Folder of the run's base model, if only it shows the architecture.
        trace: Whether to trace models that no plan has traced yet, which takes seconds.
    """
    rows = []
    reason = UNKNOWN
    for phase in view.started:
        if phase.launch is None or not phase.metrics or phase.name not in runs:
            continue
        try:
            predicted = _predict(phase, runs[phase.name], base, trace=trace)
        except PipelineError as error:
            reason = (
                f"The planner has no forecast of phase {phase.name}: {error.what}."
                if trace
                else UNKNOWN
            )
            continue
        rows += [[f"{phase.name}, {what}", *cells] for what, *cells in _rows(phase, predicted)]
    if not rows:
        return reason
    text = ["The planner counts tensors and buffers, and for weights the trained model alone."]
    if any("memory" in row[0] and not row[-1] for row in rows):
        text.append(
            "What was measured of host memory also has Python and its libraries, about 0.5 GiB a "
            "process, so it has no ratio."
        )
    head = ["phase", "forecast", "measured", "ratio"]
    return Panel("The planner's forecast", text, table=Table(rows, head, numbers=True))


def _predict(phase: PhaseView, run: PlannedRun, base: Path | None, *, trace: bool) -> Prediction:
    assert phase.launch is not None
    device = phase.ran_on.values.get("device") if phase.ran_on else None
    cpu = device in (None, "cpu")
    configured = run.phase(phase.name)
    tracer = (Tracer if trace else StoredTracer)(run, configured, base, cpu=cpu)
    # What a tracer says before it builds a model is not for one that builds none.
    with nullcontext() if trace else redirect_stderr(StringIO()):
        traced = tracer.trace(engines=[phase.launch.derived.engine])
    machine = PlannedMachine(None, None, cpu=cpu)
    made = plan(
        run, phase.name, machine, base=base, traced=traced, only=[phase.launch.launch.preset]
    )
    return made.column(made.mode)[0]


def _rows(phase: PhaseView, predicted: Prediction) -> Iterator[list[str]]:
    host = phase.metrics.get("train_host_total_peak_bytes")
    if predicted.launch.cpu:
        yield from _row("memory", predicted.device, host, exact=False)
    else:
        device = phase.metrics.get("train_device_total_peak_bytes")
        yield from _row("device memory", predicted.device, device)
        yield from _row("host memory", predicted.host, host, exact=False)
    sizes = {
        "rolling checkpoints": _size(phase.folder, "progress/step-*/*.safetensors"),
        "state": _size(phase.folder, "state/*.safetensors"),
        "weights": _size(phase.folder, "weights/**/*.safetensors"),
    }
    for stored in predicted.disk:
        yield from _row(f"{stored.name} on disk", stored.bytes, sizes.get(stored.name))


def _row(
    what: str, forecast: int, measured: int | None, *, exact: bool = True
) -> Iterator[list[str]]:
    if measured and forecast:
        ratio = f"{measured / forecast:.2f}" if exact else ""
        yield [what, gib(forecast), gib(measured), ratio]


def _size(folder: Path, pattern: str) -> int:
    """Return the bytes of files; the planner counts tensors, and a header has a few kB."""
    return sum(path.stat().st_size for path in folder.glob(pattern))
