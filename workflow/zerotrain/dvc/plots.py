"""What DVC draws of a run, and names as its models."""

from __future__ import annotations

from typing import Any

from zerotrain.config import RunConfig


def plots_of(run: RunConfig) -> list[dict[str, Any]]:
    """Curves over the steps of the whole run, which the last phase's evaluation holds, and what
    each phase made."""
    last = f"results/{run.run}/{run.phases[-1].name}/evaluation"
    curves = {
        "Training loss": ("loss.csv", "loss", "loss"),
        "Learning rate": ("loss.csv", "learning_rate", "learning rate"),
        "Host memory": ("records/memory.csv", "host_bytes", "bytes"),
        "Device memory": ("records/memory.csv", "device_bytes", "bytes"),
    }
    plots: list[dict[str, Any]] = [
        {title: {"x": "step", "y": {f"{last}/{file}": column}, "y_label": label}}
        for title, (file, column, label) in curves.items()
    ]
    if not run.is_text:
        plots += [
            {f"results/{run.run}/{phase.name}/evaluation/grid.png": None} for phase in run.phases
        ]
    return plots


def artifacts_of(run: RunConfig) -> dict[str, Any]:
    """The run's weights, by phase, for DVC's model registry."""
    return {
        f"{run.run}-{phase.name}": {
            "path": f"results/{run.run}/{phase.name}/weights",
            "type": "model",
            "desc": f"{run.family} weights of run {run.run} after phase {phase.name}.",
            "labels": [run.family, "lora" if run.lora else "full"],
        }
        for phase in run.phases
    }
