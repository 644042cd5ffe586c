"""Advice after an out-of-memory error: planned and measured memory, and the preset that fits.

A trace of the model takes seconds and memory of its own, so the process that started the training
requests it, once, after the failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zerotrain.artifact.layout import CONFIGS
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import find_config
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.planner import AUTO, Plan, fits, plan, this_machine
from zerotrain.launch.planner.prediction import Prediction
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import gib

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
    has_disk = made.phase.launch.offload_path is not None
    for name in names[names.index(own.preset) + 1 :]:
        one = made.rows[name][made.mode]
        usable = not one.useless and (has_disk or not one.swap)
        if made.machine.refusal(read_preset(AUTO.with_name(f"{name}.yaml"))):
            continue
        memory = made.machine.device_memory or 0
        if usable and one.device < own.device and fits(one, memory, made.machine.host_memory):
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
