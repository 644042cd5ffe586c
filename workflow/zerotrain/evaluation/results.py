"""The results of an evaluation: metrics, with labels and units, a language model's answers, CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

from zerotrain.artifact.documents import check_type, read_json_lines, read_object
from zerotrain.machine.output import format_figure
from zerotrain.machine.regular_file import open_new, write_text
from zerotrain.training.reporting.log_lines import Line

ANSWERS = "answers.jsonl"
BASE, RAW = "base.png", "raw.png"
"""Grids of an evaluation next to its own: of the base model, and of the weights whose average is
what is exported."""
METRICS = "records/metrics.json"
"""Copy of metrics.json in the folder: no part of its identity, for it has seconds and bytes."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Measured:
    """The samples or answers of an evaluation, and their metrics."""

    metrics: Mapping[str, float | None]
    """By their names in metrics.json; None if there was nothing to measure."""
    prompts: list[str]
    """For text, the last question of each conversation."""
    shown: str
    """The file to look at first."""
    write: Callable[[Path], None]
    """Writes the samples or answers into a folder."""
    systems: Sequence[str] = ()
    """For text, the system's turn before each prompt, or empty text."""
    conditioning_images: Sequence[Sequence[str]] = ()
    """The files that `write` writes for each prompt's conditioning images; empty without any."""


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` items, evenly spaced over all of them.

    Files of one subject often share a prefix, so that the first items would show only one subject.
    """
    count = min(len(items), most)
    return [items[place * len(items) // count] for place in range(count)]


@dataclass(frozen=True)
class Answer:
    """A prompt with the model's answer."""

    prompt: str
    expected: str | None
    """None for a prompt from the configuration."""
    generated: str


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Write one answer per line."""
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in answers]
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_answers(path: Path) -> list[Answer]:
    """Return the answers that an evaluation wrote.

    Raises:
        DocumentError: a line is no answer.
    """
    return [check_type(line, Answer, path) for line in read_json_lines(path)]


def read_metrics(path: Path) -> dict[str, int | float | None]:
    """Return what an evaluation measured of a phase.

    Raises:
        FileError: the file is missing, or is no file.
        DocumentError: it is damaged.
    """
    hint = "remove it; `snakemake` evaluates the phase again"
    found = read_object(path, hint=hint)
    return check_type(found, dict[str, int | float | None], path, hint=hint)


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
    return format_figure(value)


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


COLUMNS = ("phase", "step", "samples", "loss", "learning_rate", "grad_norm")
VALIDATION = ("phase", "step", "val_loss", "val_loss_ema")
"""Columns of the losses of a validation; the last one is empty without averaged weights."""
MEMORY = ("phase", "step", "host_bytes", "device_bytes")


def write_memory(log: Sequence[Line], path: Path) -> None:
    """Write the memory that training used as CSV, for the lines of the log that have it."""
    _write(path, MEMORY, [line for line in log if "host_bytes" in line])


def write_validations(validations: Sequence[Line], path: Path) -> None:
    """Write the losses of the validations as CSV."""
    _write(path, VALIDATION, validations)


def write_metrics(phase: str, metrics: Mapping[str, float | None], path: Path) -> None:
    """Write what was measured of a phase as a row of CSV, without what could not be measured."""
    row = {"phase": phase, **{key: one for key, one in metrics.items() if one is not None}}
    _write(path, [*row], [row])


def write_csv(log: Sequence[Line], path: Path) -> None:
    """Write the log as CSV without times, so that equal trainings give equal files."""
    _write(path, COLUMNS, log)


def _write(path: Path, columns: Sequence[str], rows: Sequence[Line]) -> None:
    with TextIOWrapper(open_new(path), encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
