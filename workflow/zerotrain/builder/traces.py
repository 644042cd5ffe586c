"""Traces of models for the forecast: those of the store, and one process that makes a new one.

A trace takes 10 to 60 seconds and imports torch, so `zerotrain plan` makes it, in a process of its
own; this server never imports torch. There is one at a time: a form that has changed since needs
another trace.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from zerotrain.builder.draft import Draft
from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.forecasts import find_base
from zerotrain.launch.planner.prediction import Prediction
from zerotrain.launch.planner.traced import TracedModel
from zerotrain.launch.planner.tracing import Tracer, micro_batch

MOST = 64
"""Traces that are kept in memory."""
ANY_GPU = "24 GiB"
"""A trace for a GPU is that of any GPU."""


@dataclass(frozen=True)
class Tracing:
    """A trace that is being made, or was not possible."""

    what: str
    error: str = ""


class Traces:
    """The traces that a server has read, and the process that makes one."""

    def __init__(self) -> None:
        self.predictions: dict[str, dict[str, Prediction | PipelineError]] = {}
        """What was predicted by them."""
        self._known: dict[str, TracedModel] = {}
        self._failed: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        self._making = ""
        self._file = Path()
        self._lock = Lock()

    def find(
        self, draft: Draft, run: RunConfig, phase: Phase, *, cpu: bool, begin: bool = True
    ) -> TracedModel | Tracing:
        """Return a phase's trace, or a note that it is not there yet.

        Args:
            draft: The draft.
            run: Its configuration.
            phase: Its phase.
            cpu: Whether it trains on the CPU.
            begin: Whether to make a trace that is not known. It ends the one that is being made.

        Raises:
            PipelineError: the model is unknown, or cannot be traced.
        """
        key = f"{cpu} {trace_inputs(run, phase)}"
        if (found := self._known.get(key)) is not None:
            return found
        if (found := Tracer(run, phase, find_base(run.run), cpu=cpu).known()) is not None:
            if len(self._known) >= MOST:
                self._known.pop(next(iter(self._known)))
            self._known[key] = found
            return found
        unit = "tokens" if run.is_text else "px"
        size = run.cache_size(phase)
        what = f"{run.family}, micro batch {micro_batch(phase)} at {size} {unit}"
        if not begin:
            return Tracing(what)
        with self._lock:
            return self._make(key, what, draft, phase, cpu)

    def close(self) -> None:
        """End the process that makes a trace."""
        with self._lock:
            self._end()

    def _make(self, key: str, what: str, draft: Draft, phase: Phase, cpu: bool) -> Tracing:
        if key in self._failed:
            return Tracing(what, self._failed[key])
        if self._making == key and self._process is not None:
            if self._process.poll() is None:
                return Tracing(what)
            _, errors = self._process.communicate()
            self._end()
            self._failed[key] = _error_of(errors)
            return Tracing(what, self._failed[key])
        self._end()
        with tempfile.NamedTemporaryFile(
            "w", prefix="zerotrain-plan-", suffix=".yaml", delete=False, encoding="utf-8"
        ) as file:
            file.write(draft.text)
        command = [sys.executable, "-m", "zerotrain", "plan", file.name, "--phase", phase.name]
        if not cpu:
            command += ["--device-memory", ANY_GPU]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
        self._file, self._making = Path(file.name), key
        return Tracing(what)

    def _end(self) -> None:
        """End the process, if it has not ended, and remove its file."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            self._process = None
            self._file.unlink(missing_ok=True)


def trace_inputs(run: RunConfig, phase: Phase) -> str:
    """Return all values that a trace depends on, except files, code and libraries."""
    values: list[Any] = [
        run.family, run.base, run.run, run.adapter_values(), run.frozen_parameters,
        run.trainable_parameters, run.base_model_precision, run.base_model_exclude_modules,
        run.cache.max_sequence_length, run.phases[0].train.resolution, micro_batch(phase),
        run.cache_size(phase), phase.launch.mixed_precision,
        run.data.model_dump_json(include={"conditioning_images", "conditioning_columns"}),
    ]  # fmt: skip
    return json.dumps(values, default=str)


def _error_of(text: str) -> str:
    """Return the sentence of a plan that ended without a trace."""
    sentences = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    last = next(reversed(text.splitlines()), "it ended without a message")
    return sentences[-1].removeprefix("ERROR: ") if sentences else f"the plan failed: {last}"
