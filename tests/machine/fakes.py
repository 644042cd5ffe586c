"""Machines that are not here."""

from __future__ import annotations

from typing import Any

from zerotrain.machine.detect import Accelerator, Device, Machine
from zerotrain.machine.host import Host

GIB = 2**30
A100 = Device(name="NVIDIA A100", total=40 * GIB, free=39 * GIB, capability=(8, 0))
T4 = Device(name="Tesla T4", total=16 * GIB, free=15 * GIB, capability=(7, 5))


def machine(accelerator: Accelerator = "cpu", *devices: Device, **host: Any) -> Machine:
    """A machine of 64 GiB and 8 cores, whose processor does not compute fp16."""
    has = {"memory": 64 * GIB, "available": 60 * GIB, "cores": 8, **host}
    return Machine(accelerator=accelerator, host=Host(**has), devices=devices)
