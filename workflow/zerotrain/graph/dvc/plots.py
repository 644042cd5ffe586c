"""The plots of a run in dvc.yaml."""

from __future__ import annotations

from typing import Any

from zerotrain.artifact.layout import RunFolder
from zerotrain.config.run import RunConfig


def plots_of(run: RunConfig) -> list[dict[str, Any]]:
    """Return the curves over all steps, from the last phase's evaluation, and of each phase the
    metrics and the grid."""
    folders = [RunFolder(run.run).phase(phase.name).evaluation for phase in run.phases]
    curves: dict[str, tuple[str, str | list[str], str]] = {
        "Training loss": ("loss.csv", "loss", "loss"),
        **_validation(run),
        "Learning rate": ("loss.csv", "learning_rate", "learning rate"),
        "Memory": ("records/memory.csv", ["host_bytes", "device_bytes"], "bytes"),
    }
    plots: list[dict[str, Any]] = [
        {title: {"x": "step", "y": {f"{folders[-1]}/{file}": column}, "y_label": label}}
        for title, (file, column, label) in curves.items()
    ]
    plots += [
        {
            f"{title} of each phase": {
                "template": "scatter",
                "x": "step",
                "y": {f"{folder}/metrics.csv": metric for folder in folders},
                "y_label": title.lower(),
            }
        }
        for metric, title in _plotted_metrics(run).items()
    ]
    if not run.is_text:
        plots += [{str(folder / "grid.png"): None} for folder in folders]
    return plots


def _validation(run: RunConfig) -> dict[str, tuple[str, str | list[str], str]]:
    """Return the curve of the validations by its title; empty for a run without any."""
    validated = [phase for phase in run.phases if phase.validation]
    if not validated:
        return {}
    averaged = any(phase.train.use_ema for phase in validated)
    columns = ["val_loss", "val_loss_ema"] if averaged else "val_loss"
    return {"Validation loss": ("validation.csv", columns, "loss")}


def _plotted_metrics(run: RunConfig) -> dict[str, str]:
    """Return the metrics that every evaluation of a run has, with their titles."""
    metrics = {"train_loss": "Training loss"}
    if run.data.holdout:
        metrics["val_loss"] = "Held-out loss"
    if run.evaluate.judge != "none" and not run.is_text:
        metrics["prompt_accuracy"] = "Prompt accuracy"
    if run.is_text and run.data.holdout:
        metrics["exact_match"] = "Exact match"
    return metrics
