"""Traces of models for the forecast: those of the store, and one process that makes a new one.

A trace takes 10 to 60 seconds and imports torch, so `zerotrain plan` makes it, in a process of its
own; this server never imports torch. There is one at a time: a form that has changed since needs
another trace.
"""

from __future__ import annotations

import json
import signal
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
from zerotrain.launch.planner import trace_store
from zerotrain.launch.planner.forecasts import find_base
from zerotrain.launch.planner.prediction import Prediction
from zerotrain.launch.planner.trace_store import TracedModel
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
        tracer = Tracer(run, phase, find_base(run.run), cpu=cpu)
        if (found := tracer.known()) is not None:
            return self._keep(key, found)
        unit = "tokens" if run.is_text else "px"
        size = run.cache_size(phase)
        what = f"{run.family}, micro batch {micro_batch(phase)} at {size} {unit}"
        if not begin:
            return Tracing(what)
        with self._lock:
            if self._making == key and self._process is not None:
                if (code := self._process.poll()) is None:
                    return Tracing(what)
                _, errors = self._process.communicate()
                self._end()
                # It may have written its trace and ended since the store was read.
                if (found := tracer.known()) is not None:
                    return self._keep(key, found)
                self._failed[key] = _error_of(code, errors)
            if key not in self._failed:
                self._start(key, draft, phase, cpu)
            return Tracing(what, self._failed.get(key, ""))

    def close(self) -> None:
        """End the process that makes a trace."""
        with self._lock:
            self._end()

    def _keep(self, key: str, found: TracedModel) -> TracedModel:
        if len(self._known) >= MOST:
            self._known.pop(next(iter(self._known)), None)
        self._known[key] = found
        return found

    def _start(self, key: str, draft: Draft, phase: Phase, cpu: bool) -> None:
        """Start the process that makes a trace."""
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


def _error_of(code: int, text: str) -> str:
    """Return the sentence of a plan that ended without a trace."""
    if code < 0:
        return f"the plan was ended by signal {-code} ({signal.Signals(-code).name})"
    sentences = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    if sentences:
        return sentences[-1].removeprefix("ERROR: ")
    if code == 0:
        return (
            f"the model was traced, but its trace is not in {trace_store.folder()}: "
            "set XDG_CACHE_HOME to a folder that can be written"
        )
    last = next(reversed(text.splitlines()), "it ended without a message")
    return f"the plan failed with exit code {code}: {last}"
