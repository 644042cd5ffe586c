"""Output of `zerotrain plan` for a configuration or for a few values."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from zerotrain.config.families import LANGUAGE_MODELS
from zerotrain.config.read import parse_config, read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.section import Memory
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.fit import search
from zerotrain.launch.planner.forecasts import find_base
from zerotrain.launch.planner.options import PlanOptions
from zerotrain.launch.planner.planner import PlannedMachine, described_machine, plan, this_machine
from zerotrain.launch.planner.table import parts_table, table


def plan_report(options: PlanOptions, *, width: int = 100) -> list[str]:
    """Return the lines of the plan for a configuration, or for values without one.

    Args:
        options: What to plan, and for which device.
        width: Columns of the terminal.

    Raises:
        PipelineError: a value is invalid, or the model is unknown.
    """
    if (options.config is None) == (options.base is None):
        raise PipelineError(
            "plan: give a config FILE, or --base and what else differs from the defaults",
            hint="zerotrain plan config/config.yaml, or zerotrain plan --base "
            "stabilityai/stable-diffusion-xl-base-1.0 --batch-size 8 --gpu 'RTX 4090'",
        )
    run = read_config(options.config) if options.config else _make_run(options)
    name = options.phase or run.phases[0].name
    machine = _machine(run, name, options)
    if options.fit:
        return search(run, name, machine, base=find_base(run.run))
    made = plan(run, name, machine, base=find_base(run.run))
    if options.parts is None:
        return table(made, width=width)
    if options.parts not in made.rows:
        raise PipelineError(
            f"--parts {options.parts}: no such preset is planned",
            hint=f"one of {', '.join(made.rows)}",
        )
    return parts_table(made.rows[options.parts][made.mode])


def _make_run(options: PlanOptions) -> RunConfig:
    """Return a run with one phase and these values; its data is never read."""
    text = options.family in LANGUAGE_MODELS
    size = {"max_length": options.max_length} if text else {"resolution": options.resolution}
    count = options.conditioning_images
    conditioning = {"conditioning_images": [f"{n}" for n in range(count)]} if count else {}
    raw = {
        "run": "plan",
        "family": options.family,
        "base": options.base,
        "data": {"source": "sums"} if text else {"images": "images", **conditioning},
        "train": {
            **size,
            "global_batch_size": options.batch_size,
            "gradient_checkpointing": options.gradient_checkpointing,
        },
        "launch": {
            "mixed_precision": options.precision, "num_processes": options.processes
        },
        "phases": [{"name": "plan", "until": 1}],
        **({"lora": {"rank": options.lora_rank}} if options.lora_rank else {}),
    }  # fmt: skip
    return parse_config(raw, "plan")


def _machine(run: RunConfig, name: str, options: PlanOptions) -> PlannedMachine:
    device = _size("--device-memory", options.device_memory)
    host = _size("--host-memory", options.host_memory)
    if device is not None or options.gpu is not None:
        return described_machine(device, host, options.gpu)
    return this_machine(run.phase(name), host_memory=host)


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(TypeAdapter(Memory).validate_python(text))
    except ValidationError as error:
        raise PipelineError(f"{option} {text!r} is no size", hint="as '24 GiB'") from error
