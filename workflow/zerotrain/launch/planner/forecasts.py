"""Forecasts of the memory of a phase's jobs on one machine, for clusters that need it in advance.

A forecast takes seconds, and torch, which the Snakefile does not import; so each is made once, in a
separate process (`python -m zerotrain.launch.planner.forecasts`), and is stored in
.snakemake/forecasts under the digest of all that it depends on: the phase, the model's
architecture, the version of the planner and those of libraries.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.artifact import digest, file_sha256, write_whole
from zerotrain.artifact.documents import read_object
from zerotrain.artifact.layout import RunFolder
from zerotrain.config.families import FAMILIES
from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.inputs import FP32
from zerotrain.launch.planner.storage import parameters_of
from zerotrain.launch.planner.trace_store import model_key
from zerotrain.machine.disk_errors import DiskError

if TYPE_CHECKING:
    from zerotrain.launch.planner.prediction import Prediction

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
        command = [sys.executable, "-m", "zerotrain.launch.planner.forecasts"]
        done = subprocess.run(
            command, input=json.dumps(missing), text=True, stdout=sys.stderr, stderr=subprocess.PIPE
        )
        last = (done.stderr.strip().splitlines() or [""])[-1]
        for key in (one["key"] for one in missing):
            stored[key] = read(key) or {"unknown": last or f"exit code {done.returncode}"}
    return {place: stored[key] or {} for place, key in keys.items()}


def forecast_key(run: RunConfig, phase: Phase, *, cpu: bool) -> str:
    """Return the digest of what a forecast depends on."""
    base = run.base if run.is_preset else str(made_base(run) or run.base)
    known: dict[str, Any] = {"family": run.family}
    with contextlib.suppress(PipelineError):  # of an architecture that is not known
        known = model_key(run, base, None if run.is_text else run.phases[0].train.resolution)
    return digest(
        {
            **known,
            "conditioning": run.data.conditioning_folders or run.data.conditioning_columns,
            "train": phase.train.model_dump(mode="json", exclude={*WITHOUT_EFFECT}),
            "launch": phase.launch.model_dump(mode="json"),
            "cpu": cpu,
            "presets": _presets(),
        }
    )


def made_base(run: RunConfig) -> Path | None:
    """Return the run's base artifact, if it exists and only it shows the architecture."""
    return None if run.is_preset or _is_known(run.family, run.base) else find_base(run.run)


@cache
def _is_known(family: str, base: str) -> bool:
    with contextlib.suppress(PipelineError):
        return bool(find_architecture(family, base))
    return False


def find_base(run: str) -> Path | None:
    """Return the base artifact of a run, if it exists."""
    folder = RunFolder(run).base
    return folder if (folder / "manifest.json").is_file() else None


@cache
def _presets() -> list[str]:
    """Return the digests of the launch presets, among which `auto` chooses."""
    return [file_sha256(file) for file in sorted(Path("config/launch").glob("*.yaml"))]


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


GIB = 2**30
LIBRARIES = GIB
"""Bytes of a process that has imported a stage's modules: 460 MiB on a CPU (psutil's rss of
zerotrain.training.rank with deepspeed, diffusers and transformers; torch 2.13). CUDA's context and
kernels, which have no formula, are additional on a GPU."""
WORK = 2 * GIB
"""Bytes of a stage that handles one shard or batch at a time, without the model that it has loaded:
a shard of weights has 1 GiB, and exists twice while it is converted."""
SNAKEMAKE = GIB // 2
"""Bytes of a job's other processes, all of it in the memory that Slurm grants: 430 MiB, of which
the jobstep's Snakemake and the one that it starts take 174 each, train_phase 72, srun 7 and shells
the rest (rss on the first of two nodes, snakemake 9.27, executor slurm 2.8)."""
STATE = 4
"""Values per parameter in an external checkpoint: weight, master weight, two moments."""


def machine_memory(config: RunConfig, name: str, *, cpu: bool = False) -> dict[str, int]:
    """Return the bytes on one machine, by rule, of a phase's jobs and of those that it depends on.

    Args:
        config: The run's configuration.
        name: The phase.
        cpu: Whether it trains on the CPU, where weights, gradients and moments are in this memory.

    Raises:
        PipelineError: the model is unknown, or the preset is impossible.
    """
    launch = config.phase(name).launch
    predicted = _prediction(config, name, cpu=cpu)
    of_all = predicted.device if cpu else predicted.host
    processes = launch.num_processes // launch.machines
    sizes = _parameters(config.family, str(made_base(config) or config.base))
    trained = sizes[FAMILIES[config.family].trained_name]
    stages = {
        # The launcher is a separate process.
        "train_phase": of_all // launch.machines + (processes + 1) * LIBRARIES,
        "cache_latents": FP32 * (sum(sizes.values()) - trained) + LIBRARIES + WORK,
        "evaluate": FP32 * sum(sizes.values()) + LIBRARIES + WORK,
        "export_weights": LIBRARIES + WORK,
        "import_checkpoint": STATE * FP32 * trained + LIBRARIES + WORK,
    }
    return {stage: taken + SNAKEMAKE for stage, taken in stages.items()}


def _prediction(config: RunConfig, name: str, *, cpu: bool) -> Prediction:
    """Return the prediction for the phase's preset; for `auto` the chosen one, or the maximum."""
    # Only the process that makes forecasts plans.
    from zerotrain.launch.planner.planner import PlannedMachine, choose_preset, plan

    launch = config.phase(name).launch
    memory = None if cpu else launch.device_memory
    machine = PlannedMachine(memory, launch.host_memory, cpu=cpu)
    base = made_base(config)
    only = () if launch.preset == "auto" else (launch.preset,)
    made = plan(config, name, machine, base=base, only=only)
    if launch.preset != "auto":
        return made.column(made.mode)[0]
    if made.choice is not None:
        return made.rows[choose_preset(made)[0]][made.mode]
    return max(made.column(made.mode), key=lambda one: one.device if cpu else one.host)


@cache
def _parameters(family: str, base: str) -> Mapping[str, int]:
    """Return the number of parameters of each part of the model."""
    architecture = find_architecture(family, base)
    return {
        name: parameters_of(part, architecture.source) for name, part in architecture.parts.items()
    }


def main() -> None:
    """Make the forecasts that stdin requests: a list of {"run", "phase", "cpu", "key"}."""
    gc.disable()  # libraries and traces create millions of objects that live to the end
    for asked in json.load(sys.stdin):
        config = RunConfig.model_validate(asked["run"])
        try:
            memory = machine_memory(config, asked["phase"], cpu=asked["cpu"])
        except PipelineError as error:
            why = str(error).partition("\n")[0].removeprefix("ERROR: ")
            write(asked["key"], {"unknown": why})
        else:
            write(asked["key"], {"bytes": memory})


if __name__ == "__main__":
    main()
