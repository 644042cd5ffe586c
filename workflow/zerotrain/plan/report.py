"""`zerotrain plan`: what the command prints, of a configuration or of a few values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML

from zerotrain.config import RunConfig, parse_config, read_config
from zerotrain.config.section import Memory
from zerotrain.errors import PipelineError
from zerotrain.families import LANGUAGE_MODELS
from zerotrain.plan.fit import search
from zerotrain.plan.hardware import TFLOPS, find_tflops
from zerotrain.plan.planner import Place, here, plan
from zerotrain.plan.table import parts_table, table

RESULTS = Path("results")


def plan_report(
    config: Path | None,
    values: Mapping[str, Any],
    *,
    phase: str | None = None,
    device_memory: str | None = None,
    host_memory: str | None = None,
    gpu: str | None = None,
    parts: str | None = None,
    fit: bool = False,
    width: int = 100,
) -> list[str]:
    """The lines of the plan.

    Args:
        config: A run's configuration; without one `values` are planned.
        values: family, base, resolution or max_length, batch_size, precision, processes,
            lora_rank, gradient_checkpointing.
        phase: The phase; default: the first.
        device_memory: Of a GPU; default: this machine's.
        host_memory: Of the machine; default: this one's.
        gpu: Name of a GPU whose speed is known.
        parts: A preset to show part by part instead of the table.
        fit: Search what fits instead.
        width: Columns of the terminal.

    Raises:
        PipelineError: a value that cannot be, or a model that is not known.
    """
    run = read_config(config) if config else _run_of(values)
    name = phase or run.phases[0].name
    place = _place(run, name, device_memory, host_memory, gpu)
    tflops = _tflops(gpu)
    if fit:
        return search(run, name, place, tflops=tflops, base=_base(run))
    made = plan(run, name, place, base=_base(run))
    if parts is None:
        return table(made, tflops=tflops, width=width)
    if parts not in made.rows:
        raise PipelineError(
            f"--parts {parts}: no such preset is planned", hint=f"one of {', '.join(made.rows)}"
        )
    return parts_table(made.rows[parts][made.mode])


def phase_report(
    values: Mapping[str, Any], config: Path | None, base: str | None, *, width: int = 100
) -> list[str]:
    """The lines of the plan of a phase that is not in its run's configuration yet.

    Args:
        values: The phase, as a configuration has it.
        config: The run's configuration, or
        base: an SDXL to train instead.
        width: Columns of the terminal.

    Raises:
        PipelineError: the phase does not fit the run, or the model is not known.
    """
    raw: dict[str, Any] = {"run": "plan", "base": base, "data": {"images": "images"}}
    if config is not None:
        read_config(config)
        raw = YAML(typ="safe").load(config.read_text())
    run = parse_config({**raw, "phases": [dict(values)]}, str(config or "plan"))
    name = run.phases[0].name
    return table(plan(run, name, here(run.phase(name)), base=_base(run)), width=width)


def _run_of(values: Mapping[str, Any]) -> RunConfig:
    """A run of one phase with these values; its data is never looked at."""
    rank, text = values["lora_rank"], values["family"] in LANGUAGE_MODELS
    size = "max_length" if text else "resolution"
    raw = {
        "run": "plan",
        "family": values["family"],
        "base": values["base"],
        "data": {"source": "sums"} if text else {"images": "images"},
        "train": {
            size: values[size],
            "global_batch_size": values["batch_size"],
            "gradient_checkpointing": values["gradient_checkpointing"],
        },
        "launch": {
            "mixed_precision": values["precision"], "num_processes": values["processes"]
        },
        "phases": [{"name": "plan", "until": 1}],
        **({"lora": {"rank": rank}} if rank else {}),
    }  # fmt: skip
    return parse_config(raw, "plan")


def _place(
    run: RunConfig, name: str, device_memory: str | None, host_memory: str | None, gpu: str | None
) -> Place:
    place = here(run.phase(name))
    if device_memory is not None or gpu is not None:
        # A GPU of elsewhere; this machine's engines say nothing about it.
        memory = _size("--device-memory", device_memory) if device_memory else place.device_memory
        memory = None if device_memory is None and place.cpu else memory
        place = Place(memory, None if place.cpu else place.host_memory, gpu or "")
    if host_memory is not None:
        place = replace(place, host_memory=_size("--host-memory", host_memory))
    return place


def _size(option: str, text: str) -> int:
    try:
        return int(TypeAdapter(Memory).validate_python(text))
    except ValidationError as error:
        raise PipelineError(f"{option} {text!r} is no size", hint="as '24 GiB'") from error


def _tflops(gpu: str | None) -> float | None:
    if gpu is None:
        return None
    found = find_tflops(gpu)
    if found is None:
        raise PipelineError(
            f"--gpu {gpu}: its speed is not known", hint=f"known: {', '.join(TFLOPS)}"
        )
    return found


def _base(run: RunConfig) -> Path | None:
    """The base model of a run that has been made."""
    folder = RESULTS / run.run / "base"
    return folder if (folder / "manifest.json").is_file() else None
