"""Reports of a training: progress on the screen, metrics.jsonl, trackers, resource use."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.artifact import copy_new
from zerotrain.artifact.documents import read_record
from zerotrain.artifact.layout import LOG, PENDING, RESOURCES
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.memory_watch import (
    MemoryUse,
    memory_lines,
    memory_metrics,
    over_processes,
)
from zerotrain.machine.output import print_detail
from zerotrain.machine.regular_file import open_new, open_to_read, write_text
from zerotrain.training.reporting.display import Display, format_duration
from zerotrain.training.reporting.trackers import open_trackers, points_of
from zerotrain.training.reporting.validation_history import finite_or_none
from zerotrain.training.step_time import PARTS, StepTime

LEAST_SHARE = 0.005
"""Smallest share of a step's part in the summary."""
LARGEST_EXPONENT = 700.0
"""Exponents below this have an exp that fits into a float64."""


class Log:
    """Log of one phase, which continues the log of the run so far.

    A line of metrics.jsonl is {"phase", "step", "samples", "epoch", "loss", "grad_norm",
    "learning_rate", "seconds", "samples_per_second", "seconds_data", ..., "host_bytes",
    "device_bytes"}: loss and grad_norm are means over the steps since the previous line, seconds is
    the phase's training time so far, seconds_data and similar keys are the mean time of these steps
    per part, bytes the memory in use by the first process. With several processes
    "host_bytes_by_rank" and "device_bytes_by_rank" have a number for each. "skipped" is the number
    of these steps without an update, because an fp16 gradient overflowed or a number was not finite
    (nan_action); means exclude numbers that are not finite. A schedule that changes Adam's first
    beta adds "beta1".

    At the end of an epoch a text family adds a line {"phase", "step", "epoch", "train_epoch_loss",
    "train_perplexity"}; a validation adds a line with its own names.
    """

    def __init__(
        self,
        progress: Path,
        phase: ResolvedPhase,
        records: Path | None,
        step: int,
        samples: int,
        device: torch.device,
        *,
        same_phase: bool,
    ) -> None:
        """Start from `records`, the folder of a checkpoint's or a state's records, if any.

        The log always continues; time and memory only continue within a phase.
        """
        self._phase = phase
        self._progress = progress
        self._stream = open_new(progress / LOG)
        if records and (records / LOG).is_file():
            with open_to_read(records / LOG) as before:
                shutil.copyfileobj(before, self._stream)
        self._stream.flush()
        self._used: dict[str, int | float] = {
            "train_seconds": 0.0,
            "peak_host_bytes": 0,
            "peak_device_bytes": 0,
        }
        if records and same_phase and (records / RESOURCES).is_file():
            self._used |= read_record(records / RESOURCES, dict[str, int | float])
        self._seconds_before = self._used["train_seconds"]
        self._means = Means(samples, phase.derived.epoch_size)
        if records and (records / PENDING).is_file():
            self._means.load(read_record(records / PENDING, PendingMeans), same_phase=same_phase)
        self._display = Display(phase.phase, step, phase.derived.until_step)
        self._trackers = open_trackers(phase, progress, step, self.say)
        self._uses: Mapping[str, MemoryUse] = {}
        self._began = self._line_began = time.monotonic()
        self._first_step = self._line_step = self._last_step = step
        self._time = StepTime(device)
        self._spent, self._line_spent = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)

    def lap(self, part: str) -> None:
        """Attribute the time since the last call to a part of a step: one of step_time.PARTS."""
        self._time.lap(part)

    @property
    def seconds(self) -> float:
        """Training time of the phase so far, without the time between starts."""
        return float(self._seconds_before + time.monotonic() - self._began)

    def step(
        self,
        step: int,
        samples: int,
        loss: float,
        grad_norm: float,
        lr: float,
        in_use: Sequence[Mapping[str, int]],
        beta1: float | None = None,
    ) -> None:
        """Record a finished step.

        Args:
            step: Its number in the run.
            samples: Samples of the run after it.
            loss: Mean over its samples.
            grad_norm: Before clipping; infinite if the update was skipped.
            lr: Its learning rate.
            in_use: `memory_now` of each process, by rank; empty at a step without a line.
            beta1: None unless the schedule changes it.
        """
        self._last_step = step
        self._means.add(loss, grad_norm)
        if has_line(self._phase, step):
            self._write_line(step, samples, lr, in_use, beta1)
        ended = self._means.epoch_loss(samples, self._phase.train.global_batch_size)
        if ended is not None and self._phase.train.max_length is not None:
            self._write_epoch(step, *ended)
        self._display.step(step, loss, lr)

    def _write_line(
        self,
        step: int,
        samples: int,
        lr: float,
        in_use: Sequence[Mapping[str, int]],
        beta1: float | None,
    ) -> None:
        self._take_times()
        now, steps = time.monotonic(), step - self._line_step
        values = {
            **self._means.take(),
            "learning_rate": lr,
            **({} if beta1 is None else {"beta1": beta1}),
        }
        pace: dict[str, Any] = {
            "samples_per_second": round(
                steps * self._phase.train.global_batch_size / max(now - self._line_began, 1e-9), 3
            ),
            **{
                f"seconds_{part}": round(spent / steps, 6)
                for part, spent in self._line_spent.items()
                if spent
            },
            **{f"{kind}_bytes": count for kind, count in in_use[0].items()},
        }
        if len(in_use) > 1:
            for kind in in_use[0]:
                pace[f"{kind}_bytes_by_rank"] = [memory[kind] for memory in in_use]
        self._line_began, self._line_step = now, step
        self._line_spent = dict.fromkeys(PARTS, 0.0)
        epoch = round(samples / self._phase.derived.epoch_size, 4)
        seconds = round(self.seconds, 3)
        places = {"samples": samples, "epoch": epoch}
        self._write(step, {**places, **values, "seconds": seconds, **pace})

    def _write_epoch(self, step: int, epoch: int, loss: float) -> None:
        perplexity = math.exp(loss) if loss < LARGEST_EXPONENT else None
        self._write(
            step, {"epoch": epoch, "train_epoch_loss": loss, "train_perplexity": perplexity}
        )
        if perplexity is not None:
            self._display.epoch(epoch, perplexity)

    def record_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Record the results of a validation by flat names such as val_loss."""
        self._write(step, values)

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        line = {"phase": self._phase.phase, "step": step, **_replace_nonfinite(values)}
        self._stream.write(f"{json.dumps(line)}\n".encode())
        self._stream.flush()
        for tracker in self._trackers:
            tracker.log(points_of(line), step)

    def _take_times(self) -> None:
        for part, seconds in self._time.take().items():
            self._spent[part] += seconds
            self._line_spent[part] += seconds

    def memory(self, uses: Sequence[Mapping[str, MemoryUse]], peaks: tuple[int, int]) -> None:
        """Record the memory that each process has used so far in this start, before a save.

        `peaks` are those of this process since its start: resident host memory, reserved device
        memory.
        """
        self._uses = over_processes(uses)
        for key, peak in zip(("peak_host_bytes", "peak_device_bytes"), peaks, strict=True):
            self._used[key] = max(self._used[key], peak)

    def say(self, text: str) -> None:
        """Show a line to the user."""
        self._display.say(text)

    def detail(self, text: str) -> None:
        """Write a line to the stage's log; to the terminal without one."""
        print_detail(text)

    def write_records(self, folder: Path) -> None:
        """Copy the log and the resources used so far into a draft's records."""
        self._take_times()
        for tracker in self._trackers:
            tracker.flush()
        folder.mkdir()
        copy_new(self._progress / LOG, folder / LOG)
        resources = {
            **self._used,
            "train_seconds": round(self.seconds, 3),
            **{
                f"{part}_seconds": round(self._used.get(f"{part}_seconds", 0.0) + spent, 3)
                for part, spent in self._spent.items()
            },
            **(memory_metrics(self._uses, "train") if self._uses else {}),
        }
        write_text(folder / RESOURCES, json.dumps(resources) + "\n")
        write_text(folder / PENDING, json.dumps(asdict(self._means.state())) + "\n")

    def close(self) -> None:
        """Log the resources used; close the progress bar, the files and the trackers."""
        with ExitStack() as rest:
            for tracker in reversed(self._trackers):
                rest.callback(tracker.close)
            rest.callback(self._stream.close)
            rest.callback(self._log_summary)
            rest.callback(self._display.close)
            with suppress(RuntimeError):  # a failed device fails again
                self._take_times()

    def _log_summary(self) -> None:
        for line in self._summary():
            self.detail(f"{self._phase.phase}: {line}")

    def _summary(self) -> list[str]:
        steps, whole = self._last_step - self._first_step, sum(self._spent.values())
        if not steps or not whole:
            return []
        shares = sorted(self._spent.items(), key=lambda item: -item[1])
        listed = [(part, share / whole) for part, share in shares if share / whole >= LEAST_SHARE]
        split = ", ".join(f"{part} {share:.0%}" for part, share in listed)
        took = f"{steps} steps in {format_duration(time.monotonic() - self._began)}: {split}"
        return [took, *(memory_lines(self._uses, "training") if self._uses else [])]


class NoLog(Log):
    """Null log: of several processes only the first one logs, the others discard their reports."""

    def __init__(self) -> None:
        pass

    def _discard(self, *_: object, **__: object) -> None:
        pass

    lap = step = record_validation = memory = write_records = say = detail = close = _discard


def has_line(phase: ResolvedPhase, step: int) -> bool:
    """Return whether the log has a line of this step."""
    return step % phase.train.log_every == 0 or step == phase.derived.until_step


def _replace_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, with None for floats that JSON cannot represent."""
    return {
        key: finite_or_none(value) if isinstance(value, float) else value
        for key, value in values.items()
    }


@dataclass(frozen=True)
class PendingMeans:
    """Content of pending.json: what Means has added up so far."""

    steps: list[tuple[float | None, float | None]]
    """Loss and grad_norm of each step since the last log line; None if not finite, as JSON has no
    such number."""
    epoch: tuple[int, float, int]
    """The sample from which it is added up, the sum and the number of its losses."""


class Means:
    """Means that a training logs: over the steps since the last log line, and over an epoch.

    Both are saved with each checkpoint, so that a resumed training logs the same bits as an
    uninterrupted one.
    """

    def __init__(self, samples: int, epoch_size: int) -> None:
        """Start at sample `samples` of the run; an epoch has `epoch_size` samples."""
        self._epoch_size = epoch_size
        self._steps: list[tuple[float, float]] = []
        self._epoch_from = samples
        self._epoch_sum, self._epoch_steps = 0.0, 0

    def add(self, loss: float, grad_norm: float) -> None:
        """Add one step; grad_norm is infinite if the update was skipped, and loss may be."""
        self._steps.append((loss, grad_norm))
        if math.isfinite(loss):
            self._epoch_sum += loss
            self._epoch_steps += 1

    def take(self) -> dict[str, Any]:
        """Return the mean loss and grad_norm of the steps since the last call.

        `skipped` counts the skipped updates, if any. A mean over no step is None.
        """
        losses = [loss for loss, _ in self._steps if math.isfinite(loss)]
        norms = [norm for _, norm in self._steps if math.isfinite(norm)]
        line: dict[str, Any] = {
            "loss": sum(losses) / len(losses) if losses else None,
            "grad_norm": sum(norms) / len(norms) if norms else None,
        }
        if len(norms) < len(self._steps):
            line["skipped"] = len(self._steps) - len(norms)
        self._steps = []
        return line

    def epoch_loss(self, samples: int, batch: int) -> tuple[int, float] | None:
        """Return number and mean loss of the epoch that a step ended; None if it ended none.

        Args:
            samples: Samples of the run after the step.
            batch: Samples of the step. A step across two epochs belongs to the first.
        """
        ended, first = samples // self._epoch_size, (samples - batch) // self._epoch_size
        if ended == first:
            return None
        # An epoch has no mean if its first steps were not added here.
        whole = self._epoch_from - first * self._epoch_size < batch
        epoch = (ended, self._epoch_sum / max(self._epoch_steps, 1))
        counted = self._epoch_steps
        self._epoch_from, self._epoch_sum, self._epoch_steps = samples, 0.0, 0
        return epoch if whole and counted else None

    def state(self) -> PendingMeans:
        """Return what `load` restores."""
        steps = [(finite_or_none(loss), finite_or_none(norm)) for loss, norm in self._steps]
        return PendingMeans(steps, (self._epoch_from, self._epoch_sum, self._epoch_steps))

    def load(self, state: PendingMeans, *, same_phase: bool) -> None:
        """Continue from a state; a new phase starts a new log line, but continues the epoch."""
        self._epoch_from, self._epoch_sum, self._epoch_steps = state.epoch
        if same_phase:
            self._steps = [
                (math.inf if loss is None else loss, math.inf if norm is None else norm)
                for loss, norm in state.steps
            ]
