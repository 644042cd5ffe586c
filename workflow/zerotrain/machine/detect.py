"""Detection of the machine's accelerator, and which engines and precisions can use it.

For NVIDIA, device files and nvidia-smi answer in milliseconds without using GPU memory; facts that
only torch knows come from a separate process, python -m zerotrain.machine.detect: torch holds GPU
memory once it has queried the GPU, and a broken installation may end the process that imports it.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from zerotrain.machine.host import Host, detect_host

Accelerator = Literal["cuda", "rocm", "mps", "npu", "cpu"]
Engine = Literal["torch", "deepspeed"]
DEVICE_FILES = {
    "cuda": ("/dev/nvidiactl", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
    "npu": ("/dev/davinci_manager",),
}
"""Device files of drivers: NVIDIA's and WSL's, AMD's, Huawei's."""
NAMES = {"cuda": "CUDA", "rocm": "ROCm", "mps": "MPS", "npu": "Ascend NPU", "cpu": "CPU"}
UNTESTED = ("rocm", "npu", "mps")
AMPERE = (8, 0)
"""First compute capability with bf16."""
QUERY = ("uuid", "name", "memory.total", "memory.free", "compute_cap", "driver_version")
PROBE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU or NPU. Sizes are bytes; None if unknown."""

    name: str
    total: int | None = None
    free: int | None = None
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, as a training sees it."""

    accelerator: Accelerator
    host: Host
    devices: tuple[Device, ...] = ()
    driver: str = ""
    unused: str = ""
    """Why a present accelerator is not used; empty otherwise."""

    @property
    def name(self) -> str:
        """Return the accelerator's usual name."""
        return NAMES[self.accelerator]

    @property
    def below_ampere(self) -> Device | None:
        """Return the first device without bf16, if any."""
        return next((d for d in self.devices if d.capability and d.capability < AMPERE), None)


@dataclass(frozen=True)
class TorchBuild:
    """The build of the installed torch, found without importing it."""

    version: str
    cuda: str | None = None
    hip: str | None = None

    @property
    def target(self) -> str:
        """Return its target, for messages."""
        if self.hip:
            return f"ROCm {self.hip}"
        return f"CUDA {self.cuda}" if self.cuda else "the CPU alone"


def torch_build() -> TorchBuild | None:
    """Read torch/version.py; None if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except OSError:
        return None
    return TorchBuild(found["__version__"], found.get("cuda"), found.get("hip"))


def detect() -> Machine:
    """Detect the machine, without importing torch into this process."""
    return _detect(detect_host(), torch_build())


def _detect(host: Host, build: TorchBuild | None) -> Machine:
    if sys.platform == "darwin" and platform.machine() == "arm64":
        shared = Device(name="Apple GPU", total=host.memory)
        return Machine(accelerator="mps", host=host, devices=(shared,))
    if _present("cuda"):
        if build is None or build.cuda is None:
            return _unused(host, "an NVIDIA GPU", build, "torch of a CUDA build")
        return _nvidia(host)
    if _present("rocm"):
        if build is None or build.hip is None:
            return _unused(host, "an AMD GPU", build, "torch of a ROCm build")
        return probed(host)
    if _present("npu"):
        if importlib.util.find_spec("torch_npu") is None:
            return _unused(host, "an Ascend NPU", build, "torch_npu")
        return probed(host)
    return Machine(accelerator="cpu", host=host)


def probed(host: Host) -> Machine:
    """Describe the machine as torch sees it, in a separate process."""
    answer = probe()
    if answer.get("accelerator", "cpu") == "cpu":
        why = answer.get("error") or "it finds none"
        return Machine(accelerator="cpu", host=host, unused=f"torch cannot use it: {why}")
    devices = (
        Device(**{**device, "capability": tuple(device["capability"] or ()) or None})
        for device in answer["devices"]
    )
    return Machine(accelerator=answer["accelerator"], host=host, devices=tuple(devices))


@cache
def probe(timeout_s: float = PROBE_SECONDS) -> dict[str, Any]:
    """Run this module: accelerator, devices, and how torch and DeepSpeed load.

    Returns:
        At least "error", empty if torch was imported.
    """
    command = [sys.executable, "-m", "zerotrain.machine.detect"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch did not end within {timeout_s:g} s"}
    except (ValueError, IndexError):
        lines = ended.stderr.strip().splitlines() or ["it printed nothing"]
        return {"error": f"importing torch ended with code {ended.returncode}: {lines[-1]}"}


def _present(kind: str) -> bool:
    return any(Path(file).exists() for file in DEVICE_FILES[kind])


def _unused(host: Host, what: str, build: TorchBuild | None, needed: str) -> Machine:
    have = f"torch {build.version} is built for {build.target}" if build else "torch is missing"
    reason = f"{what} is here, but {have}: it needs {needed}"
    return Machine(accelerator="cpu", host=host, unused=reason)


def _nvidia(host: Host) -> Machine:
    program = shutil.which("nvidia-smi")
    if program is None:
        return probed(host)
    query = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return probed(host)
    rows = [row for row in csv.reader(ended.stdout.splitlines(), skipinitialspace=True)]
    if ended.returncode or not rows or any(len(row) != len(QUERY) for row in rows):
        return probed(host)  # the driver is broken, or too old for a field
    chosen = _visible(rows)
    if not chosen:
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides the GPUs"
        return Machine(accelerator="cpu", host=host, driver=rows[0][5], unused=hidden)
    devices = tuple(_device(row) for row in chosen)
    return Machine(accelerator="cuda", host=host, devices=devices, driver=rows[0][5])


def _visible(rows: list[list[str]]) -> list[list[str]]:
    """Select the GPUs of CUDA_VISIBLE_DEVICES, in its order; CUDA stops at the first unknown."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return rows
    chosen = []
    for word in (word.strip() for word in wanted.split(",")):
        found = [
            row
            for number, row in enumerate(rows)
            if word == str(number) or (word.startswith("GPU-") and row[0].startswith(word))
        ]
        if not found:
            break
        chosen += found
    return chosen


def _device(row: list[str]) -> Device:
    _, name, total, free, capability, _ = row
    major, _, minor = capability.partition(".")
    return Device(
        name=name,
        total=_mebibytes(total),
        free=_mebibytes(free),
        capability=(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None,
    )


def _mebibytes(text: str) -> int | None:
    """Parse nvidia-smi's number; GPUs that share the host's memory have "[N/A]"."""
    return int(text) * 2**20 if text.isdecimal() else None


def main() -> None:
    """Print what torch and DeepSpeed find here, as one JSON line.

    Its keys are "error", "accelerator", "devices", "threads" and "deepspeed".
    """
    try:
        found = {"error": "", **_torch()}
    except Exception as error:  # any error of a broken installation is the answer
        found = {"error": _sentence(error)}
    else:
        found["deepspeed"] = _deepspeed()
    print(json.dumps(found), flush=True)


def _torch() -> dict[str, Any]:
    import torch

    from zerotrain.machine.device import device_type

    kind = device_type()
    devices: list[dict[str, Any]] = []
    if kind in ("cuda", "npu"):
        module = torch.get_device_module(kind)
        for number in range(module.device_count()):
            free, total = module.mem_get_info(number)
            devices.append(
                {
                    "name": module.get_device_name(number),
                    "total": total,
                    "free": free,
                    "capability": None
                    if kind == "npu" or torch.version.hip
                    else torch.cuda.get_device_capability(number),
                }
            )
    elif kind == "mps":
        devices = [{"name": "MPS", "total": None, "free": None, "capability": None}]
    accelerator = "rocm" if kind == "cuda" and torch.version.hip else kind
    return {"accelerator": accelerator, "devices": devices, "threads": torch.get_num_threads()}


def _deepspeed() -> str:
    """Return why DeepSpeed cannot be imported; empty if it can."""
    try:
        import deepspeed  # noqa: F401
    except Exception as error:
        return _sentence(error)
    return ""


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


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


if __name__ == "__main__":
    main()
