"""What fits: the search of `zerotrain plan --fit`, and advice after an out-of-memory error.

A trace of the model takes seconds and memory of its own, so the process that started the training
requests the advice, once, after the failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain.artifact.layout import CONFIGS
from zerotrain.config.models import Phase
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import find_config
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.planner import (
    AUTO,
    HOST_HINT,
    Plan,
    PlannedMachine,
    fits,
    plan,
    this_machine,
)
from zerotrain.launch.planner.prediction import MODES, Mode, Prediction
from zerotrain.launch.planner.tracing import Tracer
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import gib

SMALLER = (1.0, 0.75, 0.5, 0.25)
"""Shares of the pixel area, or of the tokens, that are tried if not even one sample fits."""


@dataclass(frozen=True)
class Fit:
    """Combination that fits."""

    size: int
    """Side in pixels, or length of the longest row in tokens."""
    micro_batch: int
    prediction: Prediction


def search(
    config: RunConfig,
    name: str,
    machine: PlannedMachine,
    *,
    auto: Path = AUTO,
    base: Path | None = None,
) -> list[str]:
    """Return for each preset and mode of activations the largest micro batch that fits.

    The global batch stays the same: accumulation compensates for a smaller micro batch. If not even
    one sample fits under any preset, smaller images or shorter rows are tried.

    Raises:
        PipelineError: no device is known, or nothing fits.
    """
    phase = config.phase(name)
    if machine.device_memory is None:
        raise PipelineError(
            "--fit, but no GPU is known here", hint="name its memory: --device-memory '24 GiB'"
        )
    tracer = Tracer(config, phase, base, cpu=machine.cpu)
    whole = config.cache_size(phase)
    unit, least = ("tokens", "length") if config.is_text else ("px", "area")
    for size in _lengths(whole) if config.is_text else _resolutions(whole):
        fits = list(_search_size(config, phase, machine, auto, tracer, size))
        if fits:
            trained = tracer.trace(1, size).model.trained_parameters
            lines = _lines(fits, phase, machine, trained, f"{size} {unit}")
            return lines if size == whole else [f"Nothing fits at {whole} {unit}.", *lines]
    raise PipelineError(
        f"nothing fits {machine.describe()}, not even one sample of a quarter of the {least}",
        hint="train an adapter (--lora-rank 16), use more processes, or a larger GPU"
        + (HOST_HINT if machine.host_is_ours else ""),
    )


def _search_size(
    config: RunConfig, phase: Phase, machine: PlannedMachine, auto: Path, tracer: Tracer, size: int
) -> Iterator[Fit]:
    """Yield the largest micro batch that fits, for each preset and mode."""
    settled: set[tuple[str, Mode]] = set()
    *larger, one_sample = _micro_batches(phase)

    def fitting(batch: int) -> list[Prediction]:
        made = plan(config, phase.name, machine, auto=auto, traced=tracer.trace(batch, size))
        memory = machine.device_memory or 0
        every = [one for row in made.rows.values() for one in row.values()]
        return [
            one for one in every if made.is_usable(one) and fits(one, memory, machine.host_memory)
        ]

    least = fitting(one_sample)
    if not least:  # a larger batch does not fit either
        return
    for batch in (*larger, one_sample):
        for one in least if batch == one_sample else fitting(batch):
            key = one.preset, one.mode
            if key not in settled:
                settled.add(key)
                yield Fit(size, batch, one)


def _micro_batches(phase: Phase) -> list[int]:
    """Return the divisors of a process's share of the global batch, the largest first."""
    share = phase.train.global_batch_size // phase.launch.num_processes
    return [size for size in range(share, 0, -1) if share % size == 0]


def _lengths(tokens: int) -> list[int]:
    """Return the phase's length, and shorter ones."""
    return list(dict.fromkeys(max(2, int(tokens * share)) for share in SMALLER))


def _resolutions(side: int) -> list[int]:
    """Return the phase's resolution, and smaller ones, as multiples of 64 if it is one."""
    step = 64 if side % 64 == 0 and side >= 256 else 8
    return list(
        dict.fromkeys(max(step, int(side * share**0.5) // step * step) for share in SMALLER)
    )


def _lines(
    fits: list[Fit],
    phase: Phase,
    machine: PlannedMachine,
    trained: int,
    size: str,
) -> list[str]:
    gpu = machine.gpu
    share = phase.train.global_batch_size // phase.launch.num_processes

    def cost(fit: Fit) -> float:
        one = fit.prediction
        return one.time(gpu, trained).seconds if gpu else one.flops

    order = list(dict.fromkeys(fit.prediction.preset for fit in fits))
    # Sorted by time if the GPU's speed is known; else by preset, then by operations.
    fits.sort(key=lambda fit: (0 if gpu else order.index(fit.prediction.preset), cost(fit)))
    lines = [
        f"What fits {machine.describe()} at {size}, global batch "
        f"{phase.train.global_batch_size}; the first is recommended:"
    ]
    for fit in fits:
        one = fit.prediction
        time = f", about {cost(fit):.2g} s a step" if gpu else ""
        lines.append(
            f"  {one.preset:<14} micro batch {fit.micro_batch:<3} accumulation "
            f"{share // fit.micro_batch:<3} {MODES[one.mode]:<24} {gib(one.device):>9} device, "
            f"{gib(one.host):>9} host{time}"
        )
    return lines


HOST_MEMORY = "host_memory"


@dataclass(frozen=True)
class Advice:
    """Advice for the user."""

    facts: tuple[str, ...] = ()
    """Numbers for the message that describes the failure."""
    what_to_do: str = ""
    """The hint; empty if nothing is known."""


def advise_after_out_of_memory(
    phase: ResolvedPhase,
    base: Path,
    saved_step: int | None,
    measured: Mapping[str, int],
    kind: str = "",
) -> Advice:
    """Find a way to continue.

    Args:
        phase: The phase as it was launched.
        base: Folder of its base model.
        saved_step: The step of its newest checkpoint; None without a checkpoint.
        measured: Bytes of the device, if there is one: total, allocated, reserved.
        kind: "host_memory" if the host's memory ran out.
    """
    facts = _format_measured(measured)
    try:
        file, named = _config(phase)
        made = _plan(read_config(file), phase, base, measured)
    except (PipelineError, OSError) as error:
        what = error.what if isinstance(error, PipelineError) else str(error)
        return Advice(facts, f"{_list_cheap_changes(phase)}; what would fit is not known: {what}")
    own = made.rows[phase.launch.preset][made.mode]
    on_host = f", {gib(own.host)} of host memory" if own.host else ""
    facts = (
        *facts,
        f"planned for {phase.launch.preset}: {gib(own.device)} of "
        f"{'memory' if own.launch.cpu else 'the device'}{on_host}",
    )
    lighter = None if kind == HOST_MEMORY else _find_lighter_preset(made, own)
    if lighter is None:
        return Advice(
            facts,
            f"{_list_cheap_changes(phase)}; no preset after {phase.launch.preset} fits here: "
            f"`zerotrain plan {file} --phase {phase.phase} --fit` searches micro batch, size and "
            "checkpointing",
        )
    needs = f"{gib(lighter.device)} of the device and {gib(lighter.host)} of host memory"
    if saved_step is None or saved_step >= phase.derived.until_step:
        way = (
            f"write `launch: {lighter.preset}` into phase {phase.phase} of {file} and start again: "
            f"it needs {needs}; no checkpoint is saved yet for a switch to continue from"
        )
    else:
        way = (
            f"`zerotrain switch {named} --to {lighter.preset}` continues from step "
            f"{saved_step} with {needs}"
        )
    return Advice(facts, f"{way}; or {_list_cheap_changes(phase)}")


def _format_measured(measured: Mapping[str, int]) -> tuple[str, ...]:
    if not measured:
        return ()
    return (
        f"measured: {gib(measured['allocated'])} in use at most, {gib(measured['reserved'])} "
        f"reserved, of {gib(measured['total'])}",
    )


def _config(phase: ResolvedPhase) -> tuple[Path, str]:
    """Return the run's file, and the word that names the run: the file if its name is not enough.

    Raises:
        PipelineError: no file of config/ has the run and the phase.
    """
    try:
        return find_config(phase.run), phase.run
    except PipelineError:
        for file in sorted(CONFIGS.glob("*.yaml"), key=lambda one: -one.stat().st_mtime):
            try:
                config = read_config(file)
            except PipelineError:
                continue
            if config.run == phase.run and phase.phase in {one.name for one in config.phases}:
                return file, str(file)
        raise


def _plan(config: RunConfig, phase: ResolvedPhase, base: Path, measured: Mapping[str, int]) -> Plan:
    machine = this_machine(config.phase(phase.phase))
    if measured:  # the present device, whatever the plan was for
        machine = replace(machine, device_memory=measured["total"])
    return plan(config, phase.phase, machine, auto=AUTO, base=base)


def _find_lighter_preset(made: Plan, own: Prediction) -> Prediction | None:
    """Return the first preset after the phase's own that uses less device memory and fits."""
    names = list(made.rows)
    for name in names[names.index(own.preset) + 1 :]:
        one = made.rows[name][made.mode]
        if made.machine.refusal(read_preset(AUTO.with_name(f"{name}.yaml"))):
            continue
        memory = made.machine.device_memory or 0
        if (
            made.is_usable(one)
            and one.device < own.device
            and fits(one, memory, made.machine.host_memory)
        ):
            return one
    return None


def _list_cheap_changes(phase: ResolvedPhase) -> str:
    """Return the changes that only cost time, then those that change the training."""
    ways = []
    if phase.derived.micro_batch_size > 1:
        ways.append(
            f"raise gradient_accumulation_steps above {phase.train.gradient_accumulation_steps}"
        )
    if not phase.train.gradient_checkpointing:
        ways.append("set gradient_checkpointing: true")
    ways.append("lower what a sample takes (resolution, max_length), or train an adapter (lora)")
    return ", ".join(ways)
