"""After an out of memory: what was planned beside what was measured, and the preset that fits.

A trace of the model takes seconds and memory of its own, so the process that started the training
asks for it, once, after the failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain.config import RunConfig, read_config
from zerotrain.config.find import CONFIGS, find_config
from zerotrain.errors import PipelineError
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import gib
from zerotrain.plan.choice import fits
from zerotrain.plan.planner import AUTO, Plan, here, plan
from zerotrain.plan.prediction import Prediction

HOST_MEMORY = "host_memory"


@dataclass(frozen=True)
class Advice:
    """What to tell."""

    facts: tuple[str, ...] = ()
    """Figures, for the sentence that says what is wrong."""
    what_to_do: str = ""
    """The way out; empty where nothing is known."""


def after_out_of_memory(
    phase: ResolvedPhase,
    base: Path,
    saved_step: int | None,
    measured: Mapping[str, int],
    kind: str = "",
) -> Advice:
    """Look for a way to go on.

    Args:
        phase: The phase as it was launched.
        base: Folder of its base model.
        saved_step: Its newest checkpoint's; None where nothing is saved.
        measured: Bytes of the device, where it was one: total, allocated, reserved.
        kind: "host_memory" where the host's memory ran out.
    """
    facts = _measured(measured)
    try:
        file, named = _config(phase)
        made = _plan(read_config(file), phase, base, measured)
    except (PipelineError, OSError) as error:
        what = error.what if isinstance(error, PipelineError) else str(error)
        return Advice(facts, f"{_cheap(phase)}; what would fit is not known: {what}")
    own = made.rows[phase.preset][made.mode]
    on_host = f", {gib(own.host)} of host memory" if own.host else ""
    facts = (
        *facts,
        f"planned for {phase.preset}: {gib(own.device)} of "
        f"{'memory' if own.launch.cpu else 'the device'}{on_host}",
    )
    found = None if kind == HOST_MEMORY else _lower(made, own)
    if found is None:
        return Advice(
            facts,
            f"{_cheap(phase)}; no preset after {phase.preset} fits here: `zerotrain plan {file} "
            f"--phase {phase.phase} --fit` searches micro batch, size and checkpointing",
        )
    needs = f"{gib(found.device)} of the device and {gib(found.host)} of host memory"
    if saved_step is None or saved_step >= phase.until_step:
        way = (
            f"write `launch: {found.preset}` into phase {phase.phase} of {file} and start again: "
            f"it needs {needs}; nothing is saved yet that a switch could go on from"
        )
    else:
        way = (
            f"`zerotrain switch {phase.run} --to {found.preset}{named}` goes on from step "
            f"{saved_step} with {needs}"
        )
    return Advice(facts, f"{way}; or {_cheap(phase)}")


def _measured(measured: Mapping[str, int]) -> tuple[str, ...]:
    if not measured:
        return ()
    return (
        f"measured: {gib(measured['allocated'])} in use at most, {gib(measured['reserved'])} "
        f"reserved, of {gib(measured['total'])}",
    )


def _config(phase: ResolvedPhase) -> tuple[Path, str]:
    """The run's file, and how `zerotrain switch` is told of it where the run's name is not enough.

    Raises:
        PipelineError: no file of config/ has the run and the phase.
    """
    try:
        return find_config(phase.run), ""
    except PipelineError:
        for file in sorted(CONFIGS.glob("*.yaml"), key=lambda one: -one.stat().st_mtime):
            try:
                config = read_config(file)
            except PipelineError:
                continue
            if config.run == phase.run and phase.phase in {one.name for one in config.phases}:
                return file, f" --config {file}"
        raise


def _plan(config: RunConfig, phase: ResolvedPhase, base: Path, measured: Mapping[str, int]) -> Plan:
    place = here(config.phase(phase.phase))
    if measured:  # the device at hand, whatever the plan was for
        place = replace(place, device_memory=measured["total"])
    return plan(config, phase.phase, place, auto=AUTO, base=base)


def _lower(made: Plan, own: Prediction) -> Prediction | None:
    """The first preset after the phase's own that takes less of the device, and fits."""
    names = list(made.rows)
    has_disk = made.phase.launch.offload_path is not None
    for name in names[names.index(own.preset) + 1 :]:
        one = made.rows[name][made.mode]
        usable = not one.useless and (has_disk or not one.swap)
        if made.place.refusal(read_preset(AUTO.with_name(f"{name}.yaml"))):
            continue
        memory = made.place.device_memory or 0
        if usable and one.device < own.device and fits(one, memory, made.place.host_memory):
            return one
    return None


def _cheap(phase: ResolvedPhase) -> str:
    """What costs nothing but time, and leaves the numbers as they are."""
    ways = []
    if phase.micro_batch_size > 1:
        ways.append(f"raise gradient_accumulation_steps above {phase.gradient_accumulation_steps}")
    if not phase.gradient_checkpointing:
        ways.append("set gradient_checkpointing: true")
    ways.append("lower what a sample takes (resolution, max_length), or train an adapter (lora)")
    return ", ".join(ways)
