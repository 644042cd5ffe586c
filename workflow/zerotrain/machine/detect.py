"""Detection of the machine's accelerator, and whether the installed torch can use it.

For NVIDIA, device files and nvidia-smi answer in milliseconds without using GPU memory; facts that
only torch knows come from a separate process (zerotrain.machine.torch_probe).
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
DEVICE_FILES = {
    "cuda": ("/dev/nvidiactl", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
    "npu": ("/dev/davinci_manager",),
}
"""Device files of drivers: NVIDIA's and WSL's, AMD's, Huawei's."""
NAMES = {"cuda": "CUDA", "rocm": "ROCm", "mps": "MPS", "npu": "Ascend NPU", "cpu": "CPU"}
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
    """Run torch_probe: accelerator, devices, and how torch and DeepSpeed load.

    Returns:
        At least "error", empty if torch was imported.
    """
    command = [sys.executable, "-m", "zerotrain.machine.torch_probe"]
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
