"""A phase's plan: every preset predicted, with and without checkpointing, and the one to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerotrain.config import Phase, RunConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.machine.detect import Machine, detect
from zerotrain.machine.host import gib
from zerotrain.machine.verdict import Engine, usable_engines
from zerotrain.plan.choice import Choice, choose
from zerotrain.plan.prediction import MODES, Mode, Prediction, Traced, predict, trace

AUTO = Path("config/launch/auto.yaml")


@dataclass(frozen=True)
class Place:
    """What is planned for."""

    device_memory: int | None
    """Bytes of one device; None where none is known."""
    host_memory: int | None
    name: str = ""
    """The device's, as its driver says it."""
    engines: Mapping[Engine, str] = field(default_factory=dict)
    """Why an engine cannot be used, by its name; empty where it can."""
    cpu: bool = False

    def refusal(self, preset: Preset) -> str:
        """Why the preset cannot run here; empty where it can."""
        return self.engines.get("torch" if preset.engine == "torch" else "deepspeed", "")


@dataclass(frozen=True)
class Plan:
    """All predictions of a phase."""

    config: RunConfig
    phase: Phase
    place: Place
    traced: Traced
    rows: Mapping[str, Mapping[Mode, Prediction]]
    """By preset, the lowest first, and by what becomes of activations."""
    mode: Mode
    """What the phase says of activations."""
    choice: Choice | None
    """None where no device is known."""

    def column(self, mode: Mode) -> list[Prediction]:
        """The predictions of all presets where activations are treated so."""
        return [row[mode] for row in self.rows.values()]


def here(phase: Phase, machine: Machine | None = None) -> Place:
    """The machine at hand, or the GPU that the phase's launch.device_memory names."""
    machine = machine or detect()
    given = phase.launch.device_memory
    engines = usable_engines(machine)
    if machine.accelerator == "cpu" and given is None:
        return Place(machine.host.memory, machine.host.memory, "CPU", engines, cpu=True)
    first = machine.devices[0] if machine.devices else None
    memory = given or (first.total if first else None)
    named = first.name if first and given is None else ""
    return Place(memory, machine.host.memory, named, engines)


def plan(
    config: RunConfig,
    name: str,
    place: Place,
    *,
    auto: Path = AUTO,
    base: Path | None = None,
    traced: Traced | None = None,
    only: Sequence[str] = (),
) -> Plan:
    """Predict every preset that `auto` chooses from.

    Args:
        config: The run's configuration.
        name: The phase.
        place: What is planned for.
        auto: The preset file with the order; its neighbours are the presets.
        base: Folder of the run's base model, where it has one already.
        traced: A trace of the same phase; default: one is made.
        only: Names of the presets to predict; default: all that `auto` chooses from.

    Raises:
        PipelineError: the model is not known, or a preset file is wrong.
    """
    phase = config.phase(name)
    names = only or read_preset(auto).choose
    presets = [read_preset(auto.with_name(f"{name}.yaml")) for name in names]
    engines: set[Engine] = {
        "torch" if preset.engine == "torch" else "deepspeed" for preset in presets
    }
    traced = traced or trace(config, phase, base, cpu=place.cpu, engines=engines)
    rows = {
        preset.name: {
            mode: predict(config, phase, preset, traced, mode, cpu=place.cpu) for mode in MODES
        }
        for preset in presets
    }
    mode: Mode = "plain"
    if phase.train.gradient_checkpointing:
        mode = "on_host" if phase.launch.cpu_checkpointing else "checkpointed"
    found = None
    if place.device_memory is not None:
        usable = [preset for preset in presets if not place.refusal(preset)]
        found = choose(
            [rows[preset.name][mode] for preset in usable],
            place.device_memory,
            place.host_memory,
            has_disk=phase.launch.offload_path is not None,
        )
        refused = dict.fromkeys(why for preset in presets if (why := place.refusal(preset)))
        found = Choice(found.chosen, (*found.reasons, *refused))
    return Plan(config, phase, place, traced, rows, mode, found)


def choose_preset(made: Plan) -> tuple[str, str]:
    """The preset that `launch: auto` takes, and the reason.

    Raises:
        PipelineError: none fits, or no device is known.
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
            f"{'max_length' if made.config.is_text else 'resolution'} and checkpointing",
        )
    return choice.chosen.preset, f"auto: {choice.why}"


def _all(rows: Mapping[str, Mapping[Mode, Prediction]]) -> Sequence[Prediction]:
    return [one for row in rows.values() for one in row.values()]
