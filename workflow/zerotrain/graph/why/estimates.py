"""What a job takes: as earlier ones, by benchmarks, logs and manifests; else by the planner."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

from zerotrain.artifact import is_published, read_manifest
from zerotrain.artifact.documents import DocumentError, read_json_lines, read_text
from zerotrain.artifact.layout import LOG
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.graph.artifacts import Planned
from zerotrain.training.checkpointing.progress_folder import saved_steps, step_folder

ENCODED = re.compile(r"^encoded (\d+) of \d+ latents, .*?(\d+) of \d+ captions", re.M)
"""What cache_latents prints at its end."""


def past_seconds(planned: Planned) -> float | None:
    """Return the seconds of a job's last run, else of another job of its rule in its run."""
    own = planned.benchmark
    others = sorted(own.parent.glob(f"{planned.rule}.*.tsv"))
    return next((found for path in [own, *others] if (found := _benchmark(path))), None)


def _benchmark(path: Path) -> float | None:
    try:
        rows = [*csv.DictReader(read_text(path).splitlines(), delimiter="\t")]
        seconds = float(rows[-1]["s"])
    except (OSError, ValueError, LookupError, TypeError, csv.Error):
        return None
    return seconds if math.isfinite(seconds) else None


def items_encoded(log: Path) -> int | None:
    """Return how many images and captions the last run of cache_latents encoded, by its log."""
    try:
        found = ENCODED.findall(read_text(log, errors="replace"))
    except (OSError, DocumentError):
        return None
    return sum(map(int, found[-1])) if found else None


def seconds_per_step(phase: Path) -> float | None:
    """Return the mean seconds of a phase's steps after its first line in the log.

    Args:
        phase: Folder of the phase.
    """
    points = _logged(phase)
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    (first, before), (last, after) = points[0], points[-1]
    return (after - before) / (last - first)


def trained_seconds(phase: Path) -> float | None:
    """Return the training time of a phase's last line in the log."""
    points = _logged(phase)
    return points[-1][1] if points else None


def _logged(phase: Path) -> list[tuple[int, float]]:
    """Return steps and seconds of a phase's lines; the log begins with those of earlier phases."""
    for log in (phase / "progress" / LOG, phase / "checkpoint" / "records" / LOG):
        try:
            lines = read_json_lines(log)
            own = [line for line in lines if line.get("phase") == phase.name and "seconds" in line]
            return [(int(line["step"]), float(line["seconds"])) for line in own]
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return []


def folder_bytes(folder: Path, kind: str) -> int | None:
    """Return the bytes of the files that a published folder's manifest lists; None without it."""
    if not is_published(folder):
        return None
    try:
        return sum(int(one["bytes"]) for one in read_manifest(folder, kind).files.values())
    except (PipelineError, OSError, LookupError, TypeError):
        return None


def checkpoint_bytes(phase: Path) -> int | None:
    """Return the bytes of a phase's checkpoint, a published or else the newest rolling one."""
    steps = saved_steps(phase / "progress")
    folders = [phase / "checkpoint", *(step_folder(phase / "progress", one) for one in steps[-1:])]
    return next((size for one in folders if (size := folder_bytes(one, "checkpoint"))), None)


def exported_bytes(phase: Path) -> int | None:
    """Return the bytes of a phase's weights and state; None unless it has both."""
    weights, state = (folder_bytes(phase / kind, kind) for kind in ("weights", "state"))
    return None if weights is None or state is None else weights + state


@dataclass(frozen=True)
class PhaseForecast:
    """The planner's forecast of a phase.

    Attributes:
        step: Seconds of a step on this machine's GPU; None if the planner does not know it.
        checkpoints: Bytes of all rolling checkpoints that are kept.
        exports: Bytes of weights and state.
    """

    step: float | None
    checkpoints: int
    exports: int


def forecast_phase(run: RunConfig, name: str) -> PhaseForecast | None:
    """Forecast a phase; this takes seconds, as it traces a step of the model without weights.

    Returns:
        None if the planner does not know the model, or the preset is `auto`.
    """
    from zerotrain.launch.planner.forecasts import made_base
    from zerotrain.launch.planner.planner import plan, this_machine  # imports torch

    phase = run.phase(name)
    if phase.launch.preset == "auto":
        return None
    machine = this_machine(phase)
    try:
        made = plan(run, name, machine, base=made_base(run), only=(phase.launch.preset,))
    except PipelineError:
        return None
    [predicted] = made.column(made.mode)
    sizes = {one.name: one.bytes for one in predicted.disk}
    trained = made.traced.model.trained_parameters
    step = predicted.time(machine.gpu, trained).seconds if machine.gpu else None
    return PhaseForecast(step, sizes["rolling checkpoints"], sizes["weights"] + sizes["state"])
