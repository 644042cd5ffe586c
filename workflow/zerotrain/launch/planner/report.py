"""Output of `zerotrain plan` for a configuration or for a few values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from pydantic import TypeAdapter, ValidationError

from zerotrain.config.families import LANGUAGE_MODELS
from zerotrain.config.read import parse_config, read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.section import Memory
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.fit import search
from zerotrain.launch.planner.forecasts import find_base
from zerotrain.launch.planner.inputs import peak
from zerotrain.launch.planner.options import PlanOptions
from zerotrain.launch.planner.planner import (
    HOST_HINT,
    RESERVE,
    Plan,
    PlannedMachine,
    described_machine,
    fits,
    plan,
    this_machine,
)
from zerotrain.launch.planner.prediction import MODES, Prediction
from zerotrain.launch.planner.shape import Shape
from zerotrain.launch.planner.storage import (
    SHARE_OF_PEAK,
    cached_bytes,
    conditioning_bytes,
    encoder_bytes,
)
from zerotrain.machine.host import gib


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


GIB, MIB = 2**30, 2**20
EMA_BYTES = 4
"""Bytes per trained parameter: an average is kept in float32."""


def table(plan: Plan, *, width: int = 100) -> list[str]:
    """Return the lines for all presets, what fits, the recommendation, and a run's other needs.

    Args:
        plan: The plan.
        width: Columns of the terminal.
    """
    return [
        *_wrap(_model(plan), width),
        *_wrap(_activations(plan), width),
        "",
        *_rows(plan),
        "",
        *_wrap(_legend(plan), width),
        "",
        *_wrap(_advice(plan), width),
        "",
        *_also(plan, width),
    ]


def parts_table(one: Prediction) -> list[str]:
    """Return the lines of one prediction, part by part, with the arithmetic of each."""
    moment = peak(one.parts, "device")[1]
    lines = [f"{one.preset}, {MODES[one.mode]}: device {gib(one.device)}, at its peak: {moment}"]
    for where in ("device", "host"):
        lines += ["", f"{where}, GiB"]
        for part in sorted((p for p in one.parts if p.where == where), key=lambda p: -p.bytes):
            there = "*" if moment in part.when and where == "device" else " "
            mark = "state " if part.state else "      "
            lines.append(f" {there}{part.bytes / GIB:9.3f}  {mark}{part.name}: {part.why}")
    lines += ["", "* is there at the peak; a state is what ZeRO's arithmetic counts"]
    if one.swap:
        lines += ["", "NVMe, GiB, all processes"]
        lines += [f"  {size / GIB:9.3f}  {name}" for name, size in one.swap.items()]
    return lines


def _model(plan: Plan) -> str:
    model, phase = plan.traced.model, plan.phase
    trained = model.trained_parameters
    what = "all trained" if trained == model.parameters else f"{trained:,} trained"
    processes = phase.launch.num_processes
    batch = plan.traced.batch
    size = f"{plan.config.cache_size(phase)} {'tokens' if plan.config.is_text else 'px'}"
    return (
        f"{plan.config.family} {plan.config.base}: {model.parameters:,} parameters, {what}; "
        f"mixed_precision {phase.launch.mixed_precision}, {size}, global "
        f"batch {phase.train.global_batch_size} = micro batch {batch} x accumulation "
        f"{phase.train.global_batch_size // batch // processes} x {processes} "
        f"process{'es' if processes > 1 else ''}"
    )


def _activations(plan: Plan) -> str:
    activations = plan.traced.engines["deepspeed"]
    return (
        f"Activations of a micro batch (ZeRO presets): {gib(activations.saved)} kept, "
        f"{gib(activations.checkpointed)} with gradient_checkpointing, "
        f"{gib(activations.on_device)} with cpu_checkpointing and {gib(activations.on_host)} on "
        "the host; forward "
        f"{activations.forward_flops / activations.batch / 1e12:.2f} TFLOP a sample"
    )


def _rows(plan: Plan) -> list[str]:
    largest = max(one.device for row in plan.rows.values() for one in row.values())
    unit, word = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    timed = plan.machine.gpu is not None
    head = ["", *("device" for _ in MODES), "host", "NVMe", "disk", "PCIe", "step" * timed]
    modes = ["  preset", "kept", "ckpt", "ckpt cpu", "", "", "", "", ""]
    # A mark follows the number of a preset that fits: the units end where the numbers do.
    units = ["", *(f"{word} " for _ in MODES), word, word, word, f"{word}/step", "s" * timed]
    body = []
    for name, row in plan.rows.items():
        own = row[plan.mode]
        chosen = plan.choice is not None and plan.choice.chosen is own
        moved = own.traffic.to_host + own.traffic.to_device
        body.append(
            [
                ("> " if chosen else "  ") + name,
                *(_cell(plan, row[mode], unit) for mode in MODES),
                f"{own.host / unit:.1f}",
                f"{sum(own.swap.values()) / unit:.1f}" if own.swap else "",
                f"{sum(item.spike for item in own.disk) / unit:.1f}",
                f"{moved / unit:.1f}" if moved else "",
                _seconds(plan, own),
            ]
        )
    return _align([head, modes, units, *body])


def _cell(plan: Plan, one: Prediction, unit: int) -> str:
    fitting = plan.machine.device_memory is not None and fits(
        one, plan.machine.device_memory, plan.machine.host_memory
    )
    return f"{one.device / unit:.1f}{'+' if fitting else ' '}"


def _seconds(plan: Plan, one: Prediction) -> str:
    if plan.machine.gpu is None:
        return ""
    return f"{one.time(plan.machine.gpu, plan.traced.model.trained_parameters).seconds:.2g}"


def _legend(plan: Plan) -> str:
    machine = plan.machine
    legend = (
        f"device: memory of {'the CPU' if machine.cpu else 'one device'} with "
        "activations kept, with gradient_checkpointing, and with cpu_checkpointing; the other "
        f"columns are of the phase's own: {MODES[plan.mode]}. disk is the most while a checkpoint, "
        "state and weights are saved"
    )
    if machine.device_memory is not None:
        reserve = "" if machine.cpu else f", with {gib(RESERVE)} of the device in reserve"
        legend += f"; + fits {machine.describe()}{reserve}"
    if machine.gpu:
        legend += (
            f"; step is an estimate: {SHARE_OF_PEAK:.0%} of {machine.gpu.tflops:g} TFLOP/s, PCIe "
            f"{machine.gpu.pcie}.0 and the CPU's Adam, one after the other"
        )
    return legend + "."


def _advice(plan: Plan) -> str:
    if plan.choice is None:
        return (
            "No GPU is known here: name it (--gpu 'RTX 4090'), or its memory (--device-memory "
            "'24 GiB'), to see what fits and what is recommended."
        )
    chosen = plan.choice.chosen
    if chosen is None:
        hint = (
            HOST_HINT if plan.machine.host_is_ours and "of host memory" in plan.choice.why else ""
        )
        return f"Nothing fits: {plan.choice.why}. `zerotrain plan --fit` searches what would{hint}."
    gpu, precision = plan.machine.gpu, plan.phase.launch.mixed_precision
    refused = (
        f" {gpu.name} does not compute bf16: set mixed_precision: fp16 (--precision fp16)."
        if gpu and not gpu.bf16 and precision == "bf16"
        else ""
    )
    return f"Recommended: {chosen.preset}, the lowest that fits. {plan.choice.why}.{refused}"


def _also(plan: Plan, width: int) -> list[str]:
    architecture = plan.traced.model.architecture
    cache = plan.config.resolved_cache
    encoders = encoder_bytes(architecture, "fp32" if plan.machine.cpu else cache.dtype)
    lines = []
    if encoders:
        each = ", ".join(f"{name} {gib(size)}" for name, size in encoders.items())
        lines.append(
            f"The cache stage, which runs before, loads {gib(sum(encoders.values()))}: {each}; the "
            "device holds the vae or the others, not both. Training loads none of it."
        )
        shape = Shape.of(plan.config, plan.config.base, 1, plan.phase.train.resolution)
        latents, text = cached_bytes(
            architecture, shape, cache.dtype, flips=plan.config.data.random_flip
        )
        buckets = plan.config.data.aspect_buckets
        latents *= buckets.crop_variants if buckets else 1
        further = conditioning_bytes(architecture, shape, cache.dtype)
        conditioning = f", {further / 1e3:,.1f} kB its conditioning images" if further else ""
        what = "a caption with its images" if shape.image_text_tokens else "a distinct caption"
        lines.append(
            f"The cache takes {latents / 1e3:,.1f} kB an image{conditioning} and {text / 1e3:,.1f} "
            f"kB {what} ({cache.dtype})."
        )
    if not plan.phase.train.use_ema:
        average = EMA_BYTES * plan.traced.model.trained_parameters
        lines.append(f"An EMA of the weights would take {gib(average)} more, wherever it is kept.")
    return [line for text in lines for line in _wrap(text, width)]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return lines


def _wrap(text: str, width: int) -> Iterable[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
