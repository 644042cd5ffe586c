"""The whole examination: machine, installation, presets, disks, and a run if one is named."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from zerotrain.config.find import CONFIGS
from zerotrain.doctor import installation, presets
from zerotrain.doctor.report import Report
from zerotrain.doctor.run import look_at_folder, look_at_run
from zerotrain.machine.detect import Machine, TorchBuild, detect, probe, torch_build
from zerotrain.machine.verdict import notices, usable_precisions
from zerotrain.switch_point import RESULTS

LEAST_FREE = 10**9
"""Bytes under results/ below which not even a small training's checkpoints fit."""
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""All that is shown of the environment."""


def examine(run: str | None = None, config: Path | None = None) -> Report:
    """Look at everything that a training depends on, and at a run.

    Args:
        run: Name of a run, or its configuration file.
        config: The configuration, where several files have the run.

    Raises:
        PipelineError: no configuration has the run.
    """
    build, machine, answer = torch_build(), detect(), probe()
    loads = _loads(build, answer)
    report = Report()
    report.problems += [reason for reason in loads.values() if reason]
    report.problems += _disagreement(machine, answer, loads)
    ops = installation.ops()
    report.facts = {
        "machine": _machine(machine),
        "host": _host(machine),
        "versions": installation.versions(build),
        "compiled_ops": ops,
        "presets": presets.verdicts(CONFIGS / "launch", machine, ops, loads)
        or f"none: {CONFIGS / 'launch'} is not here; call it in the folder of the project",
        "threads": {name: os.environ.get(name, "not set") for name in VARIABLES}
        | {"torch": answer.get("threads")},
        "disks": _disks(report),
    }
    if run is not None:
        look_at_run(run, config, machine, report)
    return report


def _loads(build: TorchBuild | None, answer: dict[str, Any]) -> dict[str, str]:
    """Why torch and DeepSpeed cannot be imported; empty where they can."""
    if build is None:
        missing = "torch is not installed: `make setup`"
        return {"torch": missing, "deepspeed": ""}
    if answer["error"]:
        return {"torch": f"torch {build.version} is broken: {answer['error']}", "deepspeed": ""}
    why = answer.get("deepspeed")
    return {"torch": "", "deepspeed": f"DeepSpeed cannot be imported: {why}" if why else ""}


def _disagreement(machine: Machine, answer: dict[str, Any], loads: dict[str, str]) -> list[str]:
    """An accelerator that is here and does not serve; one that is hidden on purpose is none."""
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
    """results/ and what else is written; adds what would stop a training."""
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
