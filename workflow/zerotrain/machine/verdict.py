"""Engines and precisions that can run on a machine, and why others cannot."""

from __future__ import annotations

from typing import Literal

from zerotrain.machine.detect import Machine, detect

Engine = Literal["torch", "deepspeed"]
UNTESTED = ("rocm", "npu", "mps")


def usable_engines(machine: Machine) -> dict[Engine, str]:
    """Return the engines, each with the reason why the machine cannot use it; empty if it can."""
    deepspeed = (
        f"DeepSpeed does not run on {machine.name}: it has neither collectives nor compiled ops "
        "for it"
        if machine.accelerator == "mps"
        else ""
    )
    return {"torch": "", "deepspeed": deepspeed}


def usable_precisions(
    machine: Machine, engine: Engine, *, swaps_weights: bool = False
) -> dict[str, str]:
    """Return the values of mixed_precision, each with the reason why the engine cannot use it here.

    Args:
        machine: The machine.
        engine: The engine.
        swaps_weights: Whether parameters are offloaded to a disk.
    """
    no = bf16 = fp16 = ""
    if old := machine.below_ampere:
        major, minor = old.capability or (0, 0)
        bf16 = f"{old.name} (compute capability {major}.{minor}) does not compute bf16"
    if engine == "deepspeed" and machine.accelerator == "cpu" and not machine.host.fp16:
        fp16 = "DeepSpeed does not train fp16 on a CPU without instructions for it"
        if swaps_weights:  # its buffers are 16-bit if the device does not compute fp16
            no = "on this CPU DeepSpeed swaps weights of 16 bits alone"
    return {"no": no, "bf16": bf16, "fp16": fp16}


def choose_precision() -> tuple[str, str]:
    """Return a 16-bit type that this machine computes, and the reason for the choice."""
    if old := usable_precisions(detect(), "torch")["bf16"]:
        return "fp16", f"chosen for this machine: {old}; --precision says another"
    return "bf16", "chosen for this machine, which computes it; --precision says another"


def notices(machine: Machine) -> list[str]:
    """Return warnings for a user before anything runs here."""
    lines = [machine.unused] if machine.unused else []
    if machine.accelerator in UNTESTED:
        lines.append(
            f"{machine.name}: untested; please report how it went, with `zerotrain doctor`"
        )
    return lines
