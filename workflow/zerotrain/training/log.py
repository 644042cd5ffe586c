"""What training tells: a bar or plain lines, training_log.jsonl, and TensorBoard files."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.device import peak_device_bytes
from zerotrain.training.progress_folder import LOG, PENDING, RESOURCES

SECONDS_BETWEEN_LINES = 10.0


class Log(Protocol):
    """What the loop tells."""

    def step(
        self,
        step: int,
        samples: int,
        loss: float,
        grad_norm: float,
        lr: float,
        beta1: float | None = None,
    ) -> None:
        """Note one finished step; grad_norm is infinite where fp16 left the update out,
        and beta1 is None where the schedule does not move it."""

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Note what a validation has found, by flat names such as `val_loss`."""

    def write_records(self, folder: Path) -> None:
        """Copy the log and the resources used so far into a draft's records."""

    def say(self, text: str) -> None:
        """A line for the person who watches."""

    def close(self) -> None:
        """Finish the bar and the files."""


class NoLog:
    """Of the processes of one training the first one tells; the others are silent."""

    def step(
        self,
        step: int,
        samples: int,
        loss: float,
        grad_norm: float,
        lr: float,
        beta1: float | None = None,
    ) -> None:
        pass

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def write_records(self, folder: Path) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class TrainingLog:
    """The log of one phase, which goes on from the log of the run so far.

    A line of training_log.jsonl is {"phase", "step", "samples", "loss", "learning_rate",
    "grad_norm", "seconds"}: loss and grad_norm are means over the steps since the line before,
    seconds is the training time of the phase up to here. fp16 adds "skipped": how many of these
    steps left the update out, because a gradient overflowed; they are no part of grad_norm. A
    schedule that moves Adam's first beta adds "beta1".
    """

    def __init__(
        self,
        progress: Path,
        phase: ResolvedPhase,
        records: Path | None,
        step: int,
        *,
        same_phase: bool,
    ) -> None:
        """Start from `records`, the folder of a checkpoint's or a state's records, if any.

        The log goes on in any case; time and memory go on within a phase.
        """
        self._phase = phase
        self._progress = progress
        before = _read(records / LOG) if records and (records / LOG).is_file() else []
        self._used_before = {"train_seconds": 0.0, "peak_host_bytes": 0, "peak_device_bytes": 0}
        if records and same_phase:
            self._used_before = json.loads((records / RESOURCES).read_text())
        (progress / LOG).write_text("".join(json.dumps(line) + "\n" for line in before))
        self._stream = (progress / LOG).open("a")
        self._board = SummaryWriter(str(progress / "tensorboard"), purge_step=step + 1)
        self._began = time.monotonic()
        self._last_line = 0.0
        self._first_step = step
        self._waiting: list[tuple[float, float]] = []
        if records and same_phase and (records / PENDING).is_file():
            pending = json.loads((records / PENDING).read_text())
            self._waiting = [(loss, norm) for loss, norm in pending]
        self._bar = (
            tqdm(initial=step, total=phase.until_step, desc=phase.phase, unit="it", smoothing=0.1)
            if sys.stderr.isatty()
            else None
        )

    @property
    def seconds(self) -> float:
        """Training time of the phase so far, without the time between starts."""
        return self._used_before["train_seconds"] + time.monotonic() - self._began

    def step(
        self,
        step: int,
        samples: int,
        loss: float,
        grad_norm: float,
        lr: float,
        beta1: float | None = None,
    ) -> None:
        """Note one finished step."""
        self._waiting.append((loss, grad_norm))
        if step % self._phase.log_every == 0 or step == self._phase.until_step:
            self._write(step, samples, lr, beta1)
        self._show(step, loss, lr)

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Note what a validation has found: a line {"phase", "step", **values}."""
        if not values:
            return
        line = {"phase": self._phase.phase, "step": step, **values}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
        for key, value in values.items():
            self._board.add_scalar(f"validation/{key}", value, step)

    def _write(self, step: int, samples: int, lr: float, beta1: float | None) -> None:
        losses, norms = zip(*self._waiting, strict=True)
        taken = [norm for norm in norms if math.isfinite(norm)]
        line: dict[str, Any] = {
            "phase": self._phase.phase,
            "step": step,
            "samples": samples,
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(taken) / len(taken) if taken else None,
            "learning_rate": lr,
            "seconds": round(self.seconds, 3),
        }
        if beta1 is not None:
            line["beta1"] = beta1
        if len(taken) < len(norms):
            line["skipped"] = len(norms) - len(taken)
        self._waiting = []
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
        for key in ("loss", "grad_norm", "learning_rate", "beta1"):
            if line.get(key) is not None:
                self._board.add_scalar(f"train/{key}", line[key], step)

    def _show(self, step: int, loss: float, lr: float) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.2e}", refresh=False)
            self._bar.update(1)
            return
        now = time.monotonic()
        until = self._phase.until_step
        if now - self._last_line < SECONDS_BETWEEN_LINES and step < until:
            return
        self._last_line = now
        rate = (step - self._first_step) / (now - self._began)
        left = int((until - step) / rate)
        self.say(
            f"{self._phase.phase}: step {step} of {until}, loss {loss:.4f}, lr {lr:.2e}, "
            f"{rate:.2f} it/s, {left // 60}:{left % 60:02d} left"
        )

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def write_records(self, folder: Path) -> None:
        """Copy the log and the resources used so far into a draft's records."""
        self._stream.flush()
        self._board.flush()
        folder.mkdir()
        (folder / LOG).write_bytes((self._progress / LOG).read_bytes())
        # Linux gives kilobytes.
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resources = {
            "train_seconds": round(self.seconds, 3),
            "peak_host_bytes": max(host, self._used_before["peak_host_bytes"]),
            "peak_device_bytes": max(peak_device_bytes(), self._used_before["peak_device_bytes"]),
        }
        (folder / RESOURCES).write_text(json.dumps(resources) + "\n")
        # The steps since the last line, which the next one is the mean of.
        (folder / PENDING).write_text(json.dumps(self._waiting) + "\n")

    def close(self) -> None:
        """Finish the bar and the files."""
        if self._bar is not None:
            self._bar.close()
        self._stream.close()
        self._board.close()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
