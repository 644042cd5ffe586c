"""Check of NVMe offload on this machine: a small training shows whether it is correct.

Swapping depends on DeepSpeed's version, the disk's block size and the kernel, and it can fail
without an error: DeepSpeed does not check the results of its reads. So `zerotrain doctor --nvme`
trains a small model with CPU offload and with NVMe offload
(zerotrain.training.process.nvme_trial), and compares their losses, master weights and moments.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from zerotrain.artifact.documents import read_bytes, read_record, read_text
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import compiled_ops
from zerotrain.machine.child_process import SUPERVISOR, supervisor_mark
from zerotrain.machine.ports import free_port
from zerotrain.machine.regular_file import open_new, write_bytes
from zerotrain.training.process.machines import thread_count
from zerotrain.training.process.swap_folder import swap_folder

TRIAL = "trial.json"
MODULE = "zerotrain.training.process.nvme_trial"
BOUND = 1e-6
"""Largest relative difference; correct swapping gives 0, since both run the same AdamW."""
TIMEOUT_SECONDS = 300.0

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""JSON has no number that is not finite: nvme_trial writes null."""


@dataclass(frozen=True)
class Trial:
    """Output of nvme_trial."""

    cpu: list[Number]
    """The loss of each step."""
    nvme: list[Number]
    state_deviation: Number


def check(phase: ResolvedPhase, launch: Path) -> str:
    """Check that NVMe offload computes the numbers of CPU offload, on this machine and its disk.

    Args:
        phase: The resolved phase.
        launch: Folder of its launch files.

    Returns:
        A message with the differences.

    Raises:
        PipelineError: the numbers differ, the trial did not end well, or the disk or the op is not
            usable.
    """
    with swap_folder(phase, 0) as (folder, _):
        compiled_ops.build_swap_op()
        return judge(phase, run_trial(phase, launch, folder))


def judge(phase: ResolvedPhase, trial: Trial) -> str:
    """Return the message for a trial whose numbers agree.

    Raises:
        PipelineError: they differ; the message has both losses of each step that differs.
    """
    pairs = list(zip(trial.cpu, trial.nvme, strict=True))
    differing = [
        f"step {step}: {nvme:.7g} instead of {cpu:.7g}"
        for step, (cpu, nvme) in enumerate(pairs, 1)
        if not _equal(nvme, cpu)
    ]
    deviation = trial.state_deviation
    if differing or not deviation <= BOUND:
        losses = f"losses differ ({'; '.join(differing)})" if differing else "losses agree"
        raise PipelineError(
            f"phase {phase.phase}: NVMe offload computes wrong updates on this machine: of a small "
            f"model trained {len(pairs)} steps with CPU and with NVMe offload (precision "
            f"{phase.launch.mixed_precision}, same seed and data) {losses}, and master weights and "
            f"moments deviate by {deviation:.2g} of their largest (bound {BOUND:g})",
            hint="use zero3_offload, which keeps in memory what this would swap; or another disk "
            "for launch.offload_path, and check it again",
        )
    largest = max(abs(nvme - cpu) / abs(cpu) for cpu, nvme in pairs)
    return (
        f"{phase.phase}: NVMe offload was checked on {phase.launch.offload_path}: {len(pairs)} "
        "steps of a "
        f"small model give the numbers of CPU offload (largest relative difference of a loss "
        f"{largest:.2g}, of weights and moments {deviation:.2g})"
    )


def run_trial(
    phase: ResolvedPhase, launch: Path, swap: Path, timeout_s: float = TIMEOUT_SECONDS
) -> Trial:
    """Run nvme_trial in a child process.

    Raises:
        PipelineError: it crashed or did not end in time; the message has its last line.
    """
    folder = swap / "check"
    folder.mkdir()
    log = folder / "log.txt"
    threads = str(thread_count(phase, phase.processes_per_machine))
    with open_new(log) as stream:
        child = subprocess.Popen(
            [sys.executable, "-m", MODULE, "--launch", str(launch), "--folder", str(folder)],
            env={
                **os.environ,
                **compiled_ops.environment(),
                **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
                "OMP_NUM_THREADS": threads,
                SUPERVISOR: supervisor_mark(),
            },
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code: int | None = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    left = folder / TRIAL
    if code == 0 and left.is_file():
        trial = read_record(left, Trial)
        shutil.rmtree(folder)
        return trial
    kept = compiled_ops.ops_folder() / "nvme-check.log"
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(kept, read_bytes(log))
    ending = "did not end within" if code is None else f"ended with code {code} before"
    raise PipelineError(
        f"phase {phase.phase}: NVMe offload could not be checked on {phase.launch.offload_path}: "
        f"a small training {ending} {timeout_s:g} s: {_last_line(log)} (log: {kept})",
        hint="NVMe offload needs libaio (`apt-get install libaio-dev`, `dnf install "
        f"libaio-devel`), its op (`{compiled_ops.BUILD_SWAP_OP}`) and a disk with direct I/O; "
        "zero3_offload needs none of them",
    )


def _equal(value: float, expected: float) -> bool:
    return math.isfinite(value) and abs(value - expected) <= BOUND * abs(expected)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in read_text(log, errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it printed nothing"])[-1][:300]
