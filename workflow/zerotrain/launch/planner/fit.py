"""`zerotrain plan --fit`: search for micro batch, resolution (or length) and checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.planner import AUTO, HOST_HINT, Plan, PlannedMachine, fits, plan
from zerotrain.launch.planner.prediction import MODES, Mode, Prediction
from zerotrain.launch.planner.tracing import Tracer
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
        return [one for one in _usable(made) if fits(one, memory, machine.host_memory)]

    least = fitting(one_sample)
    if not least:  # a larger batch does not fit either
        return
    for batch in (*larger, one_sample):
        for one in least if batch == one_sample else fitting(batch):
            key = one.preset, one.mode
            if key not in settled:
                settled.add(key)
                yield Fit(size, batch, one)


def _usable(made: Plan) -> Iterator[Prediction]:
    has_disk = made.phase.launch.offload_path is not None
    for row in made.rows.values():
        yield from (one for one in row.values() if not one.useless and (has_disk or not one.swap))


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
