"""The planner's forecast of each phase next to what it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from zerotrain.config.stage_settings import PlannedRun
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.planner import PlannedMachine, plan
from zerotrain.launch.planner.prediction import Prediction
from zerotrain.launch.planner.tracing import Tracer
from zerotrain.machine.host import gib
from zerotrain.run.phase import PhaseView
from zerotrain.run.report.parts import Panel, Table
from zerotrain.run.view import RunView

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
