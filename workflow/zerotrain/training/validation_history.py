"""What the validations of a phase have found, and what follows from it.

It lies in every checkpoint's records, so that a training that goes on from one knows exactly what
the undisturbed one knew at that step: the best value, and how long nothing was better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.artifact import RECORDS, write_json

HISTORY = "validation.json"
BEST = "best.json"
FINISHED = "finished.json"


@dataclass(frozen=True)
class Verdict:
    """What a validation asks of the training."""

    save: bool = False
    """This step is the best so far."""
    ended: bool = False
    """The phase ends here."""


@dataclass
class ValidationHistory:
    """The measures of one phase, in order."""

    began: int
    """The step before whose training the first could be made: a baseline, which is never best."""
    measured: list[dict[str, Any]] = field(default_factory=list)
    """{"step": n, "max_samples": m, "val_loss": x, ...} of each validation."""

    def at(self, step: int) -> bool:
        """Whether a step has been validated."""
        return any(one["step"] == step for one in self.measured)

    def best(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """{"step", "metric", "value"} of the lowest value, the first of equal ones; None of none.

        Args:
            settings: ResolvedPhase.validation.
        """
        metric = settings["metric_for_best_model"]
        found = [(value, step) for step, value in self._values(settings) if math.isfinite(value)]
        if not found:
            return None
        value, step = min(found)
        return {"step": step, "metric": metric, "value": value}

    def ended(self, settings: Mapping[str, Any]) -> str | None:
        """Why the phase ends at its newest validation; None where it goes on."""
        patience = settings["early_stopping_patience"]
        metric, worse, lowest = settings["metric_for_best_model"], 0, float("inf")
        for _, value in self._values(settings):
            worse = 0 if value < lowest - settings["early_stopping_threshold"] else worse + 1
            lowest = min(lowest, value)
        if patience is None or worse < patience:
            return None
        plural = "validation" if worse == 1 else "validations"
        return f"{metric} was no better in {worse} {plural} in a row (best {lowest:.6g})"

    def note(self, step: int, found: Mapping[str, float], settings: Mapping[str, Any]) -> None:
        """Add a validation; a value that is no finite number is none in JSON, either."""
        values = {name: value if math.isfinite(value) else None for name, value in found.items()}
        self.measured.append({"step": step, "max_samples": settings["max_samples"], **values})

    def _values(self, settings: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
        """Step and value of every validation after the baseline that has the metric.

        A mean over other samples cannot be compared with these. No finite number is infinity.
        """
        metric, most = settings["metric_for_best_model"], settings["max_samples"]
        for one in self.measured:
            if one["step"] > self.began and metric in one and one.get("max_samples", most) == most:
                value = one[metric]
                finite = value is not None and math.isfinite(value)
                yield one["step"], value if finite else math.inf

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's records."""
        write_json(folder / HISTORY, {"began": self.began, "measured": self.measured})


def read_history(checkpoint: Path) -> ValidationHistory | None:
    """The history in a checkpoint's records, if it has one."""
    path = checkpoint / RECORDS / HISTORY
    return ValidationHistory(**json.loads(path.read_text())) if path.is_file() else None


def note_best(progress: Path, checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Write best.json as of a checkpoint that is there: of what had been measured by then."""
    history = read_history(checkpoint)
    if history is not None:
        write_best(progress, history.best(settings))


def write_best(progress: Path, best: Mapping[str, Any] | None) -> None:
    """Note the best step of a phase, or that there is none; it is kept from pruning."""
    _replace(progress / BEST, best)


def best_step(progress: Path) -> int | None:
    """The step that is best so far, whether or not its checkpoint is there."""
    found = _read(progress / BEST)
    return None if found is None else int(found["step"])


def write_finished(progress: Path, step: int, reason: str, settings: Mapping[str, Any]) -> None:
    """Note that a phase has ended before its `until`."""
    _replace(progress / FINISHED, {"step": step, "reason": reason, "validation": dict(settings)})


def finished_step(progress: Path, settings: Mapping[str, Any] | None, until: int) -> int | None:
    """Where the phase has ended early under these very settings; None where it has not."""
    found = _read(progress / FINISHED)
    if found is None or found["validation"] != settings or found["step"] > until:
        return None
    return int(found["step"])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # no JSON: a power cut came between name and content
        return None
    return found


def _replace(path: Path, value: Mapping[str, Any] | None) -> None:
    if value is None:
        path.unlink(missing_ok=True)
        return
    new = path.with_name(f".{path.name}.new")
    write_json(new, dict(value))
    new.replace(path)
