"""evaluate: sample from a phase's weights, and measure them.

It reads weights and state, never a checkpoint, and with a run's first phase the base. What is
specific to images or text is in zerotrain.evaluation; the loss curve and the resources of the
training are the same for both.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from zerotrain import artifact
from zerotrain.artifact import RECORDS, Artifact, write_json
from zerotrain.artifact.documents import read_record
from zerotrain.artifact.layout import LOG
from zerotrain.artifact.recipe import Recipe
from zerotrain.config.stage_settings import EvaluateSettings
from zerotrain.evaluation.images import Companion, measure_images
from zerotrain.evaluation.results import (
    BASE,
    METRICS,
    RAW,
    write_csv,
    write_memory,
    write_metrics,
    write_validations,
)
from zerotrain.evaluation.text import measure_text
from zerotrain.machine.device import device_type
from zerotrain.machine.disk_errors import check_writable
from zerotrain.machine.memory_watch import MemoryWatch, memory_lines, memory_metrics
from zerotrain.machine.output import format_figure, print_detail
from zerotrain.models.base import KIND as BASE_KIND
from zerotrain.run.curves import Curves
from zerotrain.run.report.figures import Chart, Curve, loss_chart, rate_chart, write_curves
from zerotrain.state.position import EMA_SLOT
from zerotrain.state.state import State
from zerotrain.training.reporting.log_lines import read_lines

KIND = "evaluation"


def evaluate(
    settings: EvaluateSettings,
    dataset: Path,
    cache: Path,
    weights: Path,
    state: Path,
    output: Path,
    metrics: Path,
    recipe: Recipe | None = None,
) -> None:
    """Publish the evaluation of a phase and write its metrics.

    Args:
        settings: What the stage reads of the configuration.
        dataset: Folder of the dataset.
        cache: Folder of the phase's cache.
        weights: Folder of the phase's weights.
        state: Folder of the phase's state, for its log and resources.
        output: Folder to publish: loss.csv, validation.csv if there are validations, metrics.csv,
            loss.png, learning_rate.png, records/memory.csv, and for images grid.png, samples/ and
            conditioning/, and a grid and samples of each of evaluate.sizes; base.png in the first
            phase, raw.png where the weights are averaged ones; for text answers.jsonl.
        metrics: JSON file to write; `output` has a copy of it.
        recipe: What the folder records of what it is made from.

    Raises:
        PipelineError: an input is not whole, or the judge has no image or knows none of the
            prompts.
    """
    for path in (output, metrics):
        check_writable(path.parent)
    phase = settings.phase
    torch.set_num_threads(settings.num_cpu_threads_per_process or os.cpu_count() or 1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    device = device_type()
    parents = {
        "dataset": artifact.read(dataset, "dataset"),
        "cache": artifact.read(cache, "cache"),
        "weights": artifact.read(weights, "weights"),
    }
    trained = State(state)
    parents["state"] = trained.artifact
    if (base := find_base(settings, parents["weights"])) is not None:
        parents["base"] = base
    companions = _companions(parents["weights"], base, trained)
    log = Curves(list(read_lines(trained.artifact.path(f"{RECORDS}{LOG}"))))
    memory = MemoryWatch()
    made = (
        measure_text(settings, dataset, weights, device)
        if settings.is_text
        else measure_images(settings, dataset, cache, weights, device, companions)
    )
    uses = memory.use()
    measured = {
        **made.metrics,
        "train_loss": _mean_loss(log),
        "step": trained.position.step,
        "samples": trained.position.samples,
    }
    resources = f"{RECORDS}resources.json"  # damaged ones have been removed
    listed = resources in trained.artifact.files
    used = read_record(trained.artifact.path(resources), dict[str, int | float]) if listed else {}
    found = {**measured, **used, **memory_metrics(uses, "eval")}
    with artifact.publish(output, KIND, parents=parents, recipe=recipe) as draft:
        made.write(draft.folder)
        write_csv(log.steps, draft.folder / "loss.csv")
        write_metrics(phase, measured, draft.folder / "metrics.csv")
        if validations := [line for line in log.lines if "val_loss" in line]:
            write_validations(validations, draft.folder / "validation.csv")
        (draft.folder / RECORDS).mkdir(exist_ok=True)
        write_memory(log.steps, draft.folder / RECORDS / "memory.csv")
        figures = {key: finite(value) for key, value in found.items() if value is not None}
        write_json(draft.folder / METRICS, figures)
        write_curves([loss_chart(log)], log.spans, draft.folder / "loss.png")
        write_curves(_schedule(log), log.spans, draft.folder / "learning_rate.png")
        draft.content = {
            "phase": phase,
            "prompts": made.prompts,
            **({"systems": list(made.systems)} if any(made.systems) else {}),
            **(
                {"conditioning_images": [list(files) for files in made.conditioning_images]}
                if made.conditioning_images
                else {}
            ),
            "evaluate": settings.evaluate.model_dump(mode="json"),
        }
    with artifact.replacing(metrics) as new:
        write_json(new, figures)
    for line in memory_lines(uses, "evaluation"):
        print_detail(f"{phase}: {line}")
    shown = {**measured, "train_seconds": used.get("train_seconds")}
    lines = (f"{key} {format_figure(one)}" for key, one in shown.items() if one is not None)
    print(f"{phase}: {', '.join(lines)}")
    print_detail(f"  made     {output / made.shown}\n  metrics  {metrics}\n  weights  {weights}")


def find_base(settings: EvaluateSettings, weights: Artifact) -> Artifact | None:
    """Return the base that the first phase began with; None if it is gone, and for text."""
    parent = weights.parents.get("base")
    if settings.is_text or settings.phase != settings.first_phase or parent is None:
        return None
    folder = Path(parent["path"])
    if not artifact.is_published(folder):
        return None
    if artifact.read_manifest(folder, BASE_KIND).identity != parent["identity"]:
        return None
    return artifact.read(folder, BASE_KIND)


def _companions(weights: Artifact, base: Artifact | None, trained: State) -> list[Companion]:
    """List the weights whose grids stand next to that of the phase in the report."""
    found = [] if base is None else [Companion(BASE, base.folder)]
    if weights.content.get("ema") and EMA_SLOT in trained.slots:
        found.append(Companion(RAW, weights.folder, trained, weights.content["dtype"]))
    return found


def _schedule(log: Curves) -> list[Chart]:
    """Return the learning rate, and Adam's first beta if a schedule changed it."""
    beta = log.series("beta1")
    charts = [Chart("beta1", [Curve("beta1", beta)], rates=True)] if beta else []
    return [rate_chart(log), *charts]


def _mean_loss(log: Curves) -> float | None:
    """Return the mean logged loss over the phase's last tenth; None for an empty log."""
    if not log.spans:
        return None
    phase, first, last = log.spans[-1]
    tenth = last - (last - first) / 10
    losses = [loss for step, loss in log.series("loss", phase) if step > tenth]
    return sum(losses) / len(losses) if losses else None


def finite(value: Any) -> Any:
    """Return the value, or None for a float that is not finite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
