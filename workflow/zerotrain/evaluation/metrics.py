"""The metrics of a phase for people: labels, units, and a table of several phases."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

LABELS = {
    "exact_match": "answers that are exactly right",
    "perplexity": "held-out perplexity",
    "prompt_accuracy": "prompt accuracy",
    "judge_accuracy": "accuracy of the judge itself",
    "val_loss": "held-out loss",
    "train_loss": "training loss",
    "step": "steps",
    "samples": "samples seen",
    "train_seconds": "training time",
    "data_seconds": "of it: samples",
    "forward_seconds": "of it: forward",
    "backward_seconds": "of it: backward",
    "optimizer_seconds": "of it: optimizer",
    "validation_seconds": "of it: validation",
    "save_seconds": "of it: checkpoints",
    "other_seconds": "of it: the rest",
    "peak_host_bytes": "peak host memory",
    "peak_device_bytes": "peak GPU memory",
    "train_host_total_peak_bytes": "host memory of the training, all processes",
    "train_device_total_peak_bytes": "GPU memory of the training, its tensors",
    "eval_host_total_peak_bytes": "host memory of the evaluation",
    "eval_device_total_peak_bytes": "GPU memory of the evaluation, its tensors",
}
"""Labels of known metrics, in the page's order; others follow under their own names."""
SQUARED = "held-out loss (mean squared error)"
"""The held-out loss of image models, whatever loss_type was trained."""
PARTS_OF_A_PEAK = ("_begin_bytes", "_end_minus_begin_bytes", "_peak_minus_begin_bytes")
"""Ends of names that only metrics.json has: the page shows the peak of each task."""
LEARNED = (
    *("exact_match", "perplexity", "prompt_accuracy", "judge_accuracy", "val_loss", "train_loss"),
    *("step", "samples"),
)
"""Metrics that say what was learned; the others say what it took."""

Values = Mapping[str, Any]
"""The metrics of a phase, as in metrics.json."""


def format_metric(name: str, value: Any) -> str:
    """Format a metric with its unit for people."""
    if name == "exact_match" or name.endswith("_accuracy"):
        return f"{value:.1%}"
    if name.endswith("_bytes"):
        return f"{value / 1024**3:.2f} GiB" if value else "none"
    if name.endswith("_seconds"):
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes} min {seconds:02d} s" if minutes else f"{value:.1f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def is_learned(name: str) -> bool:
    """Return whether a metric says what was learned, and not what it took."""
    return name in LEARNED or not name.endswith(("_seconds", "_bytes"))


def compare_metrics(phases: Collection[Values], *, learned: bool) -> list[list[str]]:
    """Return a row for each metric that a phase has: its label, and the value of each phase.

    Args:
        phases: The metrics of each phase.
        learned: Those that say what was learned; False: those that say what it took.
    """
    items = [item for phase in phases for item in phase.items()]
    found = {n for n, value in items if is_learned(n) is learned and _worth_a_row(n, value)}
    names = [*(name for name in LABELS if name in found), *sorted(found - LABELS.keys())]
    # A language model also has its perplexity.
    labels = LABELS if "perplexity" in found else LABELS | {"val_loss": SQUARED}
    return [
        [
            labels.get(name, name),
            *(format_metric(name, one[name]) if name in one else "" for one in phases),
        ]
        for name in names
    ]


def _worth_a_row(name: str, value: Any) -> bool:
    """Return whether the page shows a metric; without a GPU, no GPU memory was used."""
    if name.endswith(PARTS_OF_A_PEAK):
        return False
    return bool(value) or not name.endswith(("_seconds", "_bytes"))
