"""`zerotrain plan --fit`: micro batch, resolution and checkpointing that fit a device."""

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
"""Shares of the pixel area that are tried where not even one sample fits."""


@dataclass(frozen=True)
class Fit:
    """A way that fits."""

    resolution: int
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
    sample fits under any preset, smaller images are tried.

    Raises:
        PipelineError: no device is known, or nothing fits at all.
    """
    phase = config.phase(name)
    if place.device_memory is None:
        raise PipelineError(
            "--fit, but no GPU is known here", hint="name its memory: --device-memory '24 GiB'"
        )
    first = trace(config, phase, base, cpu=place.cpu)
    for resolution in _resolutions(phase):
        found = list(_of_resolution(config, phase, place, auto, first, resolution))
        if found:
            return _lines(found, phase, place, tflops, first)
    raise PipelineError(
        f"nothing fits {gib(place.device_memory)}, not even one sample of a quarter of the area",
        hint="train an adapter (--lora-rank 16), use more processes, or a larger GPU",
    )


def _of_resolution(
    config: RunConfig, phase: Phase, place: Place, auto: Path, first: Traced, resolution: int
) -> Iterator[Fit]:
    """The best of each preset and mode: the first micro batch, the largest first, that fits."""
    settled: set[tuple[str, Mode]] = set()
    for batch in _micro_batches(phase):
        known = batch == first.batch and resolution == phase.train.resolution
        traced = (
            first
            if known
            else retrace(first.model, config, phase, batch, resolution, cpu=place.cpu)
        )
        made = plan(config, phase.name, place, auto=auto, traced=traced)
        for one in _usable(made):
            key = one.preset, one.mode
            if key not in settled and fits(one, place.device_memory or 0, place.host_memory):
                settled.add(key)
                yield Fit(resolution, batch, one)


def _usable(made: Plan) -> Iterator[Prediction]:
    has_disk = made.phase.launch.offload_path is not None
    for row in made.rows.values():
        yield from (one for one in row.values() if not one.useless and (has_disk or not one.swap))


def _micro_batches(phase: Phase) -> list[int]:
    """Divisors of a process's share of the global batch, the largest first."""
    share = phase.train.global_batch_size // phase.launch.num_processes
    return [size for size in range(share, 0, -1) if share % size == 0]


def _resolutions(phase: Phase) -> list[int]:
    """The phase's, and those of smaller areas, in multiples of 64 where it is one."""
    side = phase.train.resolution
    step = 64 if side % 64 == 0 and side >= 256 else 8
    return list(
        dict.fromkeys(max(step, int(side * share**0.5) // step * step) for share in SMALLER)
    )


def _lines(
    found: list[Fit], phase: Phase, place: Place, tflops: float | None, first: Traced
) -> list[str]:
    trained = first.model.trained_parameters
    share = phase.train.global_batch_size // phase.launch.num_processes

    def cost(fit: Fit) -> float:
        one = fit.prediction
        return one.time(tflops, trained).seconds if tflops else one.flops

    order = list(dict.fromkeys(fit.prediction.preset for fit in found))
    # By time where the GPU's speed is known; else the lowest preset, then the fewest operations.
    found.sort(key=lambda fit: (0 if tflops else order.index(fit.prediction.preset), cost(fit)))
    side = found[0].resolution
    lines = [
        f"What fits {gib(place.device_memory or 0)} at {side} px, global batch "
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
    if side != phase.train.resolution:
        lines.insert(0, f"Nothing fits at {phase.train.resolution} px.")
    return lines
