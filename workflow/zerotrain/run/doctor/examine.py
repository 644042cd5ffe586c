"""Examination of machine, installation, presets, disks, and optionally a run."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import CONFIGS, RESULTS
from zerotrain.artifact.source_commit import PACKAGE
from zerotrain.errors import PipelineError
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.machine import compiled_ops
from zerotrain.machine.compiled_ops import SWAP_OP
from zerotrain.machine.detect import (
    Machine,
    TorchBuild,
    detect,
    notices,
    probe,
    torch_build,
    usable_engines,
    usable_precisions,
)
from zerotrain.run.doctor.report import Report, look_at_folder, look_at_run

LEAST_FREE = 10**9
"""Free bytes under results/ below which even a small training's checkpoints do not fit."""
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""The only environment variables that are shown."""
PACKAGES = (
    "deepspeed", "accelerate", "diffusers", "transformers", "peft", "safetensors", "snakemake",
    "dvc",
)  # fmt: skip


def examine(run: str | None = None, *, nvme: bool = False) -> Report:
    """Examine everything that a training depends on, and optionally a run.

    Args:
        run: Name of a run, or its configuration file.
        nvme: Whether to check NVMe offload for the run's phases, by small trainings.

    Raises:
        PipelineError: no configuration defines the run.
    """
    build, machine, answer = torch_build(), detect(), probe()
    loads = _loads(build, answer)
    report = Report()
    report.problems += [reason for reason in loads.values() if reason]
    report.problems += _disagreement(machine, answer, loads)
    ops = find_ops()
    report.facts = {
        "machine": _machine(machine),
        "host": _host(machine),
        "versions": versions(build),
        "compiled_ops": ops,
        "presets": verdicts(CONFIGS / "launch", machine, ops, loads)
        or f"none: {CONFIGS / 'launch'} is not here; call it in the folder of the project",
        "threads": {name: os.environ.get(name, "not set") for name in VARIABLES}
        | {"torch": answer.get("threads")},
        "disks": _disks(report),
    }
    if run is not None:
        look_at_run(run, machine, report, nvme=nvme)
    return report


def _loads(build: TorchBuild | None, answer: dict[str, Any]) -> dict[str, str]:
    """Return why torch and DeepSpeed cannot be imported; empty if they can."""
    if build is None:
        missing = "torch is not installed: `make setup`"
        return {"torch": missing, "deepspeed": ""}
    if answer["error"]:
        return {"torch": f"torch {build.version} is broken: {answer['error']}", "deepspeed": ""}
    why = answer.get("deepspeed")
    return {"torch": "", "deepspeed": f"DeepSpeed cannot be imported: {why}" if why else ""}


def _disagreement(machine: Machine, answer: dict[str, Any], loads: dict[str, str]) -> list[str]:
    """List detected but unusable accelerators, except those hidden by CUDA_VISIBLE_DEVICES."""
    if machine.unused and "CUDA_VISIBLE_DEVICES" not in machine.unused:
        return [machine.unused]
    found = answer.get("accelerator", machine.accelerator)
    if not loads["torch"] and found != machine.accelerator:
        return [
            f"this machine has {machine.name}, but torch computes on {found}: driver "
            f"{machine.driver or 'unknown'} and torch's build may not go together"
        ]
    return []


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "accelerator": machine.name,
        "driver": machine.driver or None,
        "devices": [
            {
                "name": device.name,
                "memory_bytes": device.total,
                "free_bytes": device.free,
                "compute_capability": ".".join(map(str, device.capability or ())) or "unknown",
            }
            for device in machine.devices
        ],
        "bf16": usable_precisions(machine, "torch")["bf16"] or True,
        "fp16_under_deepspeed": usable_precisions(machine, "deepspeed")["fp16"] or True,
        "notices": notices(machine),
    }


def _host(machine: Machine) -> dict[str, Any]:
    host = machine.host
    return {
        "memory_bytes": host.memory,
        "available_bytes": host.available,
        "control_group_limit_bytes": host.limit,
        "lockable_bytes": "no limit" if host.lockable is None else host.lockable,
        "cores": host.cores,
        "control_group_quota_of_cores": host.quota,
    }


def _disks(report: Report) -> dict[str, Any]:
    """Examine results/ and the temporary folder; add problems that would stop a training."""
    results = RESULTS if RESULTS.is_dir() else Path()
    found = {"results": look_at_folder(results), "temporary": look_at_folder(_temporary())}
    if found["results"]["writable"] is not True:
        report.problems.append(f"{results} cannot be written: {found['results']['writable']}")
    elif found["results"]["free_bytes"] < LEAST_FREE:
        free = found["results"]["free_bytes"] / 1e6
        report.problems.append(f"{results} has {free:.0f} MB free: checkpoints will not fit")
    return found


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def verdicts(
    folder: Path, machine: Machine, ops: dict[str, Any], loads: dict[str, str]
) -> dict[str, str]:
    """Return for each preset file of a folder whether it can run.

    Args:
        folder: Folder of the presets.
        machine: The machine.
        ops: The result of `find_ops`.
        loads: Why torch and deepspeed cannot be imported, by name; empty if they can.
    """
    answers = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            preset = read_preset(path)
        except PipelineError as error:
            answers[path.stem] = f"no: {error.what}"
        else:
            answers[path.stem] = _verdict(preset, machine, ops, loads)
    return answers


def _verdict(preset: Preset, machine: Machine, ops: dict[str, Any], loads: dict[str, str]) -> str:
    if preset.engine == "auto":
        return "yes: the planner chooses one of the others; `zerotrain plan` shows which"
    if why := _refusal(preset, machine, ops, loads):
        return f"no: {why}"
    swaps_weights = preset.offload_param == "nvme"
    usable = usable_precisions(machine, preset.engine, swaps_weights=swaps_weights)
    answer = f"yes, with mixed_precision {', '.join(name for name in usable if not usable[name])}"
    wanted = {SWAP_OP} if _swaps(preset) else set()
    if preset.engine == "deepspeed":
        wanted |= ops["built"].keys() - {SWAP_OP}
    waiting = sorted(op for op in wanted if not ops["built"].get(op))
    return answer + (f"; {' and '.join(waiting)} will be built first" if waiting else "")


def _refusal(preset: Preset, machine: Machine, ops: dict[str, Any], loads: dict[str, str]) -> str:
    """Return why a preset cannot run; empty if it can."""
    if loads["torch"]:
        return loads["torch"]
    if preset.engine == "torch":
        return ""
    built = ops["built"]
    if why := usable_engines(machine)["deepspeed"] or loads["deepspeed"]:
        return why
    if not ops["compiler"] and not all(built[op] for op in built if op != SWAP_OP):
        return "its compiled ops are not built, and there is no C++ compiler"
    if _swaps(preset) and not built.get(SWAP_OP) and not ops["libaio_headers"]:
        return "libaio's headers are missing (`apt-get install libaio-dev`)"
    return ""


def _swaps(preset: Preset) -> bool:
    return "nvme" in (preset.offload_optimizer, preset.offload_param)


def versions(build: TorchBuild | None) -> dict[str, Any]:
    """Return the versions of the program, of Python and of the main dependencies."""
    return {
        "zerotrain": " ".join(filter(None, [_version("zerotrain"), _commit()])),
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": f"{build.version}, built for {build.target}" if build else None,
        **{name: _version(name) for name in PACKAGES},
    }


def find_ops() -> dict[str, Any]:
    """Return DeepSpeed's compiled ops, and the tools that build them."""
    folder, built = None, {}
    with contextlib.suppress(PackageNotFoundError):  # torch or DeepSpeed is missing
        folder, built = str(compiled_ops.ops_folder()), compiled_ops.built_ops()
    compiler = compiled_ops.compiler()
    return {
        "folder": folder,
        "built": built,
        "compiler": _first_line([compiler, "--version"]) if compiler else None,
        "ninja": _ninja(),
        "libaio_headers": has_libaio(),
        "nvcc": _nvcc(),
    }


def has_libaio() -> bool:
    """Return whether the compiler finds libaio's header, which the NVMe offload op includes."""
    compiler = compiled_ops.compiler()
    if compiler is None:
        return False
    command = [*compiler.split(), "-E", "-x", "c++", "-"]
    ended = subprocess.run(command, input=b"#include <libaio.h>\n", capture_output=True)
    return ended.returncode == 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Return the commit of the package's checkout; empty for an installed package."""
    git = ["git", "-C", str(PACKAGE)]
    tracked = _output([*git, "ls-files", "--error-unmatch", "__init__.py"])
    if not tracked:
        return ""
    changed = ", with changes" if _output([*git, "status", "--porcelain", "-uno", "."]) else ""
    return f"(commit {_output([*git, 'rev-parse', '--short=12', 'HEAD'])}{changed})"


def _ninja() -> str | None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    found = shutil.which("ninja", path=path)
    return _first_line([found, "--version"]) if found else None


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    if found is None:
        return None
    return next(
        (line for line in _output([found, "--version"]).splitlines() if "release" in line), ""
    )


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).splitlines()), "does not answer")


def _output(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if ended.returncode else ended.stdout.strip()
