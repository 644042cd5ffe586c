"""Store of memory forecasts. This module is light, since the Snakefile imports it.

A forecast takes seconds, and torch; so each is made once, in a separate process, and is stored in
.snakemake/forecasts under the digest of all that it depends on: the phase, the model's
architecture, the planner's code and torch's version.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerotrain.artifact import digest, file_sha256, write_whole
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.stage_versions import VERSIONS
from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.trace_store import VERSION
from zerotrain.machine.disk_errors import DiskError

STORE = Path(".snakemake/forecasts")
WITHOUT_EFFECT = (
    "learning_rate", "lr_scheduler", "lr_scheduler_args", "lr_warmup_steps", "lr_warmup_ratio",
    "lr_scheduler_steps", "adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay",
    "max_grad_norm", "grad_clip_method", "nan_action", "caption_dropout_probability", "ema_decay",
    "save_every", "log_every", "report_to", "tracker_project_name", "tracker_run_name",
)  # fmt: skip
"""Training values that do not change memory, so that a sweep over them needs one forecast."""

Forecast = Mapping[str, Any]
"""{"bytes": {rule: bytes of one machine}}, or {"unknown": reason}."""


def forecasts(
    wanted: Iterable[tuple[RunConfig, Phase, bool]],
) -> dict[tuple[str, str, bool], Forecast]:
    """Return the memory that phases need on one machine; missing forecasts are made first.

    Args:
        wanted: Runs, one phase of each, and whether it trains on the CPU.

    Returns:
        The forecasts by run, phase and CPU.
    """
    keys: dict[tuple[str, str, bool], str] = {}
    asked: dict[str, dict[str, Any]] = {}
    for run, phase, cpu in wanted:
        key = forecast_key(run, phase, cpu=cpu)
        keys[run.run, phase.name, cpu] = key
        values = run.model_dump(mode="json", exclude_unset=True)
        asked[key] = {"run": values, "phase": phase.name, "cpu": cpu, "key": key}
    stored = {key: read(key) for key in asked}
    if missing := [asked[key] for key, forecast in stored.items() if forecast is None]:
        command = [sys.executable, "-m", "zerotrain.launch.planner.forecast"]
        done = subprocess.run(
            command, input=json.dumps(missing), text=True, stdout=sys.stderr, stderr=subprocess.PIPE
        )
        last = (done.stderr.strip().splitlines() or [""])[-1]
        for key in (one["key"] for one in missing):
            stored[key] = read(key) or {"unknown": last or f"exit code {done.returncode}"}
    return {place: stored[key] or {} for place, key in keys.items()}


def forecast_key(run: RunConfig, phase: Phase, *, cpu: bool) -> str:
    """Return the digest of what a forecast depends on."""
    return digest(
        {
            "family": run.family,
            "model": _model(run),
            "adapter": run.adapter_values(),
            "frozen": run.frozen_parameters,
            "trainable": run.trainable_parameters,
            "precision": [run.base_model_precision, run.base_model_exclude_modules],
            "tokens": run.cache.max_sequence_length,
            "conditioning": run.data.conditioning_folders or run.data.conditioning_columns,
            "train": phase.train.model_dump(mode="json", exclude={*WITHOUT_EFFECT}),
            "launch": phase.launch.model_dump(mode="json"),
            "cpu": cpu,
            "versions": _versions(),
        }
    )


def made_base(run: RunConfig) -> Path | None:
    """Return the run's base artifact, if it exists and only it shows the architecture."""
    return None if run.is_preset or _architecture(run.family, run.base) else find_base(run.run)


@cache
def _architecture(family: str, base: str) -> Any:
    with contextlib.suppress(PipelineError):
        return asdict(find_architecture(family, base))
    return None


def find_base(run: str) -> Path | None:
    """Return the base artifact of a run, if it exists."""
    folder = RunFolder(run).base
    return folder if (folder / "manifest.json").is_file() else None


def _model(run: RunConfig) -> Any:
    """Return the architecture; a preset's name is enough, as its version is in the key."""
    if run.is_preset:
        return run.base
    made = made_base(run)
    return _architecture(run.family, str(made or run.base))


@cache
def _versions() -> list[object]:
    """Return what else a forecast comes from: stages, the planner, the presets, and torch."""
    presets = sorted(map(str, Path("config/launch").glob("*.yaml")))
    stages = [VERSIONS["build_base"], VERSION]
    return [*stages, *(file_sha256(Path(name)) for name in presets), version("torch")]


def read(key: str) -> Forecast | None:
    """Return a forecast from the store; None if it is missing."""
    try:
        return read_object(STORE / f"{key}.json")
    except (OSError, ValueError):
        return None


def write(key: str, forecast: Forecast) -> None:
    """Write a forecast into the store; if the disk refuses it, it is made again next time."""
    with contextlib.suppress(DiskError):
        write_whole(STORE / f"{key}.json", json.dumps(forecast))
