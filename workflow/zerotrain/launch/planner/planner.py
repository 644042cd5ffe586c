"""A phase's plan: predictions of every preset in every activation mode, and the recommended one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from zerotrain.config.models import Phase
from zerotrain.config.stage_settings import PlannedRun
from zerotrain.errors import PipelineError
from zerotrain.launch.planner.gpus import Gpu, find_gpu, read_gpu
from zerotrain.launch.planner.prediction import MODES, Mode, Prediction, predict
from zerotrain.launch.planner.trace_store import TracedModel
from zerotrain.launch.planner.tracing import trace
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.machine.detect import Engine, Machine, detect, usable_engines
from zerotrain.machine.host import gib

AUTO = Path("config/launch/auto.yaml")
HOST_HINT = "; --host-memory '64 GiB' plans for a machine with other host memory than this one"
RESERVE = 2**30
"""Bytes of a device that are left free for the driver's context, library workspaces and allocator
fragmentation, none of which has a formula."""


@dataclass(frozen=True)
class PlannedMachine:
    """Machine for which a phase is planned."""

    device_memory: int | None
    """Bytes of one device; None if unknown."""
    host_memory: int | None
    name: str = ""
    """The device's name according to its driver."""
    engines: Mapping[Engine, str] = field(default_factory=dict)
    """Reason why an engine is not usable, by its name; empty if it is."""
    cpu: bool = False
    host_is_ours: bool = False
    """Whether host_memory is that of this machine, although the device is another machine's."""

    @cached_property
    def gpu(self) -> Gpu | None:
        """Entry of the device in the table of GPUs, if any."""
        return find_gpu(self.name)

    def describe(self) -> str:
        """Describe its memory, and the source of the host's number."""
        device = gib(self.device_memory or 0)
        if self.cpu:
            return f"{device} of memory"
        name = self.gpu.name if self.gpu else self.name
        named = f" ({name})" if name else ""
        if self.host_memory is None:
            return f"{device}{named}"
        own = ", this machine's" if self.host_is_ours else ""
        return f"{device}{named} and {gib(self.host_memory)} of host memory{own}"

    def refusal(self, preset: Preset) -> str:
        """Return why the preset cannot run here; empty if it can."""
        return self.engines.get("torch" if preset.engine == "torch" else "deepspeed", "")


@dataclass(frozen=True)
class Choice:
    """Chosen preset, and why none before it."""

    chosen: Prediction | None
    reasons: tuple[str, ...]

    @property
    def why(self) -> str:
        """Reasons in one line."""
        return "; ".join(self.reasons)


def choose(
    predictions: Sequence[Prediction],
    device_memory: int,
    host_memory: int | None,
    *,
    has_disk: bool = False,
) -> Choice:
    """Choose the first prediction that fits.

    Args:
        predictions: Predictions in order, the lowest preset first.
        device_memory: Bytes of one device; on a CPU the machine's memory.
        host_memory: Bytes of the machine's memory; None if unknown.
        has_disk: Whether launch.offload_path names a disk, which presets that swap need.
    """
    reasons: list[str] = []
    for one in predictions:
        reason = _refusal(one, device_memory, host_memory, has_disk)
        if reason is None:
            fitting = f"{one.preset} takes {gib(one.device)} of {gib(device_memory)}"
            return Choice(one, (fitting, *reasons))
        reasons.append(reason)
    return Choice(None, tuple(reasons))


def fits(one: Prediction, device_memory: int, host_memory: int | None) -> bool:
    """Return whether a prediction fits into device and host memory."""
    return (
        one.device + (0 if one.launch.cpu else RESERVE) <= device_memory
        and (host_memory is None or one.host <= host_memory)
    )  # fmt: skip


def _refusal(
    one: Prediction, device_memory: int, host_memory: int | None, has_disk: bool
) -> str | None:
    if one.useless:
        return f"{one.preset} saves nothing on one process"
    if one.swap and not has_disk:
        return f"{one.preset} needs launch.offload_path"
    if not fits(one, device_memory, None):
        return f"{one.preset} needs {gib(one.device)} and {gib(RESERVE)} of reserve"
    if not fits(one, device_memory, host_memory):
        return f"{one.preset} needs {gib(one.host)} of host memory, of {gib(host_memory or 0)}"
    return None


@dataclass(frozen=True)
class Plan:
    """All predictions of a phase."""

    config: PlannedRun
    phase: Phase
    machine: PlannedMachine
    traced: TracedModel
    rows: Mapping[str, Mapping[Mode, Prediction]]
    """Predictions by preset, the lowest first, and by activation mode."""
    mode: Mode
    """The phase's activation mode."""
    choice: Choice | None
    """None if no device is known."""

    def is_usable(self, one: Prediction) -> bool:
        """Return whether a preset saves something here, and has the disk that it needs."""
        return not one.useless and (not one.swap or self.phase.launch.offload_path is not None)

    def column(self, mode: Mode) -> list[Prediction]:
        """Return the predictions of all presets in an activation mode."""
        return [row[mode] for row in self.rows.values()]


def this_machine(
    phase: Phase, machine: Machine | None = None, host_memory: int | None = None
) -> PlannedMachine:
    """Return this machine, or the one that the phase's device_memory and host_memory describe.

    Args:
        phase: The phase.
        machine: This machine; default: the detected one.
        host_memory: Bytes of the machine's memory; default: as the phase or this machine has.
    """
    machine = machine or detect()
    given, host = phase.launch.device_memory, host_memory or phase.launch.host_memory
    memory = host or machine.host.memory
    engines = usable_engines(machine)
    if machine.accelerator == "cpu" and given is None:
        return PlannedMachine(memory, memory, "CPU", engines, cpu=True)
    first = machine.devices[0] if machine.devices else None
    if given is not None:
        return PlannedMachine(given, memory, "", engines, host_is_ours=host is None)
    return PlannedMachine(
        first.total if first else None, memory, first.name if first else "", engines
    )


def described_machine(
    device_memory: int | None,
    host_memory: int | None,
    gpu: str | None,
    machine: Machine | None = None,
) -> PlannedMachine:
    """Return a described machine; its engines are unknown here, so all count as usable.

    Args:
        device_memory: Bytes of one device; default: those of the named GPU.
        host_memory: Bytes of the machine's memory; default: this machine's.
        gpu: The GPU's name.
        machine: This machine; default: the detected one.

    Raises:
        PipelineError: the GPU's name is unknown.
    """
    named = read_gpu(gpu) if gpu else None
    return PlannedMachine(
        device_memory or (named.memory(gpu or "") if named else None),
        (machine or detect()).host.memory if host_memory is None else host_memory,
        gpu or "",
        host_is_ours=host_memory is None,
    )


def plan(
    config: PlannedRun,
    name: str,
    machine: PlannedMachine,
    *,
    auto: Path = AUTO,
    base: Path | None = None,
    traced: TracedModel | None = None,
    only: Sequence[str] = (),
) -> Plan:
    """Predict every preset that `auto` chooses from.

    Args:
        config: The run's configuration.
        name: The phase.
        machine: The machine.
        auto: The preset file with the order; the presets are in the same folder.
        base: Folder of the run's base model, if it exists.
        traced: A trace of the same phase; default: one is made.
        only: Names of the presets to predict; default: all that `auto` chooses from.

    Raises:
        PipelineError: the model is unknown, or a preset file is invalid.
    """
    phase = config.phase(name)
    names = only or read_preset(auto).choose
    presets = [read_preset(auto.with_name(f"{name}.yaml")) for name in names]
    if config.base_model_precision != "no_change" and not only:
        presets = [preset for preset in presets if preset.zero_stage < 3]  # stage 3 refuses it
    engines: set[Engine] = {
        "torch" if preset.engine == "torch" else "deepspeed" for preset in presets
    }
    traced = traced or trace(config, phase, base, cpu=machine.cpu, engines=engines)
    rows = {
        preset.name: {
            mode: predict(config, phase, preset, traced, mode, cpu=machine.cpu) for mode in MODES
        }
        for preset in presets
    }
    mode: Mode = "plain"
    if phase.train.gradient_checkpointing:
        mode = "on_host" if phase.launch.cpu_checkpointing else "checkpointed"
    choice = None
    if machine.device_memory is not None:
        usable = [preset for preset in presets if not machine.refusal(preset)]
        choice = choose(
            [rows[preset.name][mode] for preset in usable],
            machine.device_memory,
            machine.host_memory,
            has_disk=phase.launch.offload_path is not None,
        )
        refused = dict.fromkeys(why for preset in presets if (why := machine.refusal(preset)))
        choice = Choice(choice.chosen, (*choice.reasons, *refused))
    return Plan(config, phase, machine, traced, rows, mode, choice)


def choose_preset(made: Plan) -> tuple[str, str]:
    """Return the preset that `launch: auto` selects, and the reason.

    Raises:
        PipelineError: no preset fits, or no device is known.
    """
    phase, choice = made.phase, made.choice
    if choice is None:
        raise PipelineError(
            f"phase {phase.name}: launch: auto, but the memory of this machine's GPU is not known",
            hint='set launch.device_memory, such as "24 GiB", or name a preset',
        )
    if choice.chosen is None:
        least = min(_all(made.rows), key=lambda one: one.device)
        raise PipelineError(
            f"phase {phase.name}: launch: auto, but no preset fits: {choice.why}",
            hint=f"the least is {gib(least.device)}, under {least.preset} with {MODES[least.mode]};"
            " `zerotrain plan --fit` searches micro batch, "
            f"{'max_length' if made.config.is_text else 'resolution'} and checkpointing"
            + (
                "; launch.host_memory plans for another machine's"
                if made.machine.host_is_ours and "of host memory" in choice.why
                else ""
            ),
        )
    return choice.chosen.preset, f"auto: {choice.why}"


def _all(rows: Mapping[str, Mapping[Mode, Prediction]]) -> Sequence[Prediction]:
    return [one for row in rows.values() for one in row.values()]
