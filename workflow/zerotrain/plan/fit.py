"""`zerotrain plan --fit`: micro batch, resolution (or length) and checkpointing that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerotrain.config import Phase, RunConfig
from zerotrain.errors import PipelineError
from zerotrain.machine.host import gib
from zerotrain.plan.choice import fits
from zerotrain.plan.planner import AUTO, Place, Plan, plan
from zerotrain.plan.prediction import MODES, Mode, Prediction, Traced, retrace, trace

SMALLER = (1.0, 0.75, 0.5, 0.25)
"""Shares of the pixel area, or of the tokens, that are tried where not even one sample fits."""


@dataclass(frozen=True)
class Fit:
    """A way that fits."""

    size: int
    """Side in pixels, or longest row in tokens."""
    micro_batch: int
    prediction: Prediction


def search(
    config: RunConfig,
    name: str,
    place: Place,
    *,
    tflops: float | None = None,
    auto: Path = AUTO,
    base: Path | None = None,
) -> list[str]:
    """For each preset, the largest micro batch that fits with each treatment of activations.

    The global batch stays: accumulation makes up for a smaller micro batch. Where not even one
    sample fits under any preset, smaller images or shorter rows are tried.

    Raises:
        PipelineError: no device is known, or nothing fits at all.
    """
    phase = config.phase(name)
    if place.device_memory is None:
        raise PipelineError(
            "--fit, but no GPU is known here", hint="name its memory: --device-memory '24 GiB'"
        )
    first = trace(config, phase, base, cpu=place.cpu)
    whole = config.cache_size(phase)
    unit, least = ("tokens", "length") if config.is_text else ("px", "area")
    for size in _lengths(whole) if config.is_text else _resolutions(whole):
        found = list(_of_size(config, phase, place, auto, first, size))
        if found:
            lines = _lines(found, phase, place, tflops, first, f"{size} {unit}")
            return lines if size == whole else [f"Nothing fits at {whole} {unit}.", *lines]
    raise PipelineError(
        f"nothing fits {gib(place.device_memory)}, not even one sample of a quarter of the {least}",
        hint="train an adapter (--lora-rank 16), use more processes, or a larger GPU",
    )


def _of_size(
    config: RunConfig, phase: Phase, place: Place, auto: Path, first: Traced, size: int
) -> Iterator[Fit]:
    """The best of each preset and mode: the first micro batch, the largest first, that fits."""
    settled: set[tuple[str, Mode]] = set()
    for batch in _micro_batches(phase):
        known = batch == first.batch and size == config.cache_size(phase)
        traced = first if known else retrace(first.model, config, phase, batch, size, cpu=place.cpu)
        made = plan(config, phase.name, place, auto=auto, traced=traced)
        for one in _usable(made):
            key = one.preset, one.mode
            if key not in settled and fits(one, place.device_memory or 0, place.host_memory):
                settled.add(key)
                yield Fit(size, batch, one)


def _usable(made: Plan) -> Iterator[Prediction]:
    has_disk = made.phase.launch.offload_path is not None
    for row in made.rows.values():
        yield from (one for one in row.values() if not one.useless and (has_disk or not one.swap))


def _micro_batches(phase: Phase) -> list[int]:
    """Divisors of a process's share of the global batch, the largest first."""
    share = phase.train.global_batch_size // phase.launch.num_processes
    return [size for size in range(share, 0, -1) if share % size == 0]


def _lengths(tokens: int) -> list[int]:
    """The phase's, and shorter ones."""
    return list(dict.fromkeys(max(2, int(tokens * share)) for share in SMALLER))


def _resolutions(side: int) -> list[int]:
    """The phase's, and those of smaller areas, in multiples of 64 where it is one."""
    step = 64 if side % 64 == 0 and side >= 256 else 8
    return list(
        dict.fromkeys(max(step, int(side * share**0.5) // step * step) for share in SMALLER)
    )


def _lines(
    found: list[Fit],
    phase: Phase,
    place: Place,
    tflops: float | None,
    first: Traced,
    size: str,
) -> list[str]:
    trained = first.model.trained_parameters
    share = phase.train.global_batch_size // phase.launch.num_processes

    def cost(fit: Fit) -> float:
        one = fit.prediction
        return one.time(tflops, trained).seconds if tflops else one.flops

    order = list(dict.fromkeys(fit.prediction.preset for fit in found))
    # By time where the GPU's speed is known; else the lowest preset, then the fewest operations.
    found.sort(key=lambda fit: (0 if tflops else order.index(fit.prediction.preset), cost(fit)))
    lines = [
        f"What fits {gib(place.device_memory or 0)} at {size}, global batch "
        f"{phase.train.global_batch_size}; the first is recommended:"
    ]
    for fit in found:
        one = fit.prediction
        time = f", about {cost(fit):.2g} s a step" if tflops else ""
        lines.append(
            f"  {one.preset:<14} micro batch {fit.micro_batch:<3} accumulation "
            f"{share // fit.micro_batch:<3} {MODES[one.mode]:<24} {gib(one.device):>9} device, "
            f"{gib(one.host):>9} host{time}"
        )
    return lines
