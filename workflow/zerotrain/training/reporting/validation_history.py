"""Results of a phase's validations, and the decisions based on them.

Every checkpoint's records contain them, so that a resumed training has exactly the state of an
uninterrupted one at that step: the best value, and the number of validations without improvement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any

from pydantic import AfterValidator

from zerotrain.artifact import RECORDS, write_json
from zerotrain.artifact.documents import MissingFileError, read_object, read_record
from zerotrain.errors import PipelineError

HISTORY = "validation.json"
BEST = "best.json"
FINISHED = "finished.json"


@dataclass(frozen=True)
class Verdict:
    """Consequences of a validation for the training."""

    save: bool = False
    """This step is the best so far."""
    ended: bool = False
    """The phase ends here."""


def finite_or_none(value: float) -> float | None:
    """Return a number, or None if it is not finite: JSON has no such number."""
    return value if math.isfinite(value) else None


def _check_numbers(measured: dict[str, Any]) -> dict[str, Any]:
    if type(measured.get("step")) is not int:
        raise ValueError("a validation has no step")
    if others := [name for name, value in measured.items() if type(value) not in NUMBERS]:
        raise ValueError(f"{others[0]} is no number")
    return measured


NUMBERS = (int, float, NoneType)
Measured = Annotated[dict[str, Any], AfterValidator(_check_numbers)]
"""{"step": n, "max_samples": m, "val_loss": x, ...}."""


@dataclass
class ValidationHistory:
    """Validations of one phase, in order."""

    began: int
    """The step from which the phase is validated: a baseline, which is never the best."""
    measured: list[Measured] = field(default_factory=list)

    def at(self, step: int) -> bool:
        """Return whether a step has been validated."""
        return any(one["step"] == step for one in self.measured)

    def best(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return {"step", "metric", "value"} of the first lowest value; None without a finite
        value.

        Args:
            settings: ResolvedPhase.validation.
        """
        metric = settings["metric_for_best_model"]
        finite = [(value, step) for step, value in self._values(settings) if math.isfinite(value)]
        if not finite:
            return None
        value, step = min(finite)
        return {"step": step, "metric": metric, "value": value}

    def end_reason(self, settings: Mapping[str, Any]) -> str | None:
        """Return the reason to end the phase at its newest validation; None if it continues."""
        patience = settings["early_stopping_patience"]
        metric, worse, lowest = settings["metric_for_best_model"], 0, float("inf")
        for _, value in self._values(settings):
            worse = 0 if value < lowest - settings["early_stopping_threshold"] else worse + 1
            lowest = min(lowest, value)
        if patience is None or worse < patience:
            return None
        plural = "validation" if worse == 1 else "validations"
        return f"{metric} was no better in {worse} {plural} in a row (best {lowest:.6g})"

    def note(self, step: int, results: Mapping[str, float], settings: Mapping[str, Any]) -> None:
        """Add a validation; a value that is not finite becomes None, as JSON has no such number."""
        values = {name: finite_or_none(value) for name, value in results.items()}
        self.measured.append({"step": step, "max_samples": settings["max_samples"], **values})

    def _values(self, settings: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
        """Yield step and value of every validation after the baseline that has the metric.

        A mean over another number of samples is not comparable and is skipped. A non-finite value
        counts as infinity.
        """
        metric, most = settings["metric_for_best_model"], settings["max_samples"]
        for one in self.measured:
            if one["step"] > self.began and metric in one and one.get("max_samples") == most:
                value = one[metric]
                finite = value is not None and math.isfinite(value)
                yield one["step"], value if finite else math.inf

    def write(self, folder: Path) -> None:
        """Write the history into a checkpoint's records."""
        write_json(folder / HISTORY, {"began": self.began, "measured": self.measured})


def read_history(checkpoint: Path) -> ValidationHistory | None:
    """Return the history in a checkpoint's records, if it has one.

    Raises:
        FileError: a link, a folder or a pipe has its name.
        DocumentError: it is damaged.
    """
    try:
        return read_record(checkpoint / RECORDS / HISTORY, ValidationHistory)
    except MissingFileError:
        return None


def note_best(progress: Path, checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Write best.json from the history in an existing checkpoint."""
    history = read_history(checkpoint)
    if history is not None:
        write_best(progress, history.best(settings))


def write_best(progress: Path, best: Mapping[str, Any] | None) -> None:
    """Write the best step of a phase, or remove the file without one; pruning keeps that step."""
    _replace(progress / BEST, best)


def best_step(progress: Path) -> int | None:
    """Return the best step so far, whether or not its checkpoint exists."""
    best = _read(progress / BEST)
    return None if best is None else int(best["step"])


def write_finished(progress: Path, step: int, reason: str, settings: Mapping[str, Any]) -> None:
    """Record that a phase has ended before its `until`."""
    _replace(progress / FINISHED, {"step": step, "reason": reason, "validation": dict(settings)})


def finished_step(progress: Path, settings: Mapping[str, Any] | None, until: int) -> int | None:
    """Return the step of an early end under the same settings; None if there was none."""
    finished = _read(progress / FINISHED)
    if finished is None or finished.get("validation") != settings or finished["step"] > until:
        return None
    return int(finished["step"])


def _read(path: Path) -> dict[str, Any] | None:
    """Read a file that names a step; None if it is missing or damaged, as by a power cut."""
    try:
        document = read_object(path)
    except PipelineError:
        return None
    return document if type(document.get("step")) is int else None


def _replace(path: Path, value: Mapping[str, Any] | None) -> None:
    if value is None:
        path.unlink(missing_ok=True)
        return
    new = path.with_name(f".{path.name}.new")
    write_json(new, dict(value))
    new.replace(path)
