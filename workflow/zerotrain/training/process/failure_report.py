"""Handling of an exception in a training process: message, exit code, end of the others."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.machine.child_process import SUPERVISOR
from zerotrain.machine.device import device_type
from zerotrain.machine.output import print_message
from zerotrain.training.process import ending, failures, lock
from zerotrain.training.reporting import heartbeat


def report_failure(error: Exception, launch: Path, progress: Path) -> int:
    """Report an exception that ended this process's training.

    Returns:
        The exit code: 2 if the user can fix it, 1 if a process is lost or hangs.

    Raises:
        Exception: the same exception, if it is unknown: its traceback is for the developers.
    """
    supervised = SUPERVISOR in os.environ
    if isinstance(error, PipelineError):
        if ending.write_exit_record(progress, EXIT_USER_ERROR, error.what):
            print_message(error)
        _end_other_ranks(progress)
        return EXIT_USER_ERROR
    failure = failures.recognise(error)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if failure is None or (failure.kind == failures.LOST and alone):
        raise error  # a single process has no peer to lose: its traceback shows the cause
    phase = read_run_yaml(launch / "run.yaml")
    message = failures.format_failure(failure, phase.phase, str(error))
    if failure.kind == failures.DEVICE_MEMORY:
        message = PipelineError(message.what, hint=_advise_without_plan(phase))
    if failure.kind == failures.LOST:
        if supervised:
            # The launcher knows which process died and why, unless the network failed.
            text = failures.shorten(str(error))
            print(f"rank {os.environ.get('RANK', '0')}: {text}", file=sys.stderr, flush=True)
            os._exit(failures.EXIT_FAULT)
        time.sleep(heartbeat.BEAT_SECONDS)
    of_others = failure.kind in (failures.LOST, failures.TIMEOUT)
    if of_others and (who := heartbeat.describe_hang(progress, time.time(), but=os.getpid())):
        message = PipelineError(f"{message.what}; {who}", hint=message.hint)
    # The planner knows what would fit, but takes memory and time that a rank does not have.
    later = supervised and failure.kind in failures.MEMORY
    hint, kind = (message.hint, failure.kind) if later else ("", "")
    measured = _device_memory() if failure.kind == failures.DEVICE_MEMORY else {}
    if (
        ending.write_exit_record(progress, failure.code, message.what, hint, kind, measured)
        and not later
    ):
        print_message(message)
    _end_other_ranks(progress)
    if of_others:
        lock.release_all()
        os._exit(failure.code)  # operations in progress with the others would wait again
    return failure.code


def _advise_without_plan(phase: ResolvedPhase) -> str:
    """Return the advice that is possible without a plan."""
    return (
        f"raise gradient_accumulation_steps above {phase.train.gradient_accumulation_steps}, set "
        "gradient_checkpointing: true, or continue with less on the device: `zerotrain switch "
        f"{phase.run} --to zero2_offload`, then zero3_offload"
    )


def _device_memory() -> dict[str, int]:
    """Return the device's total bytes, and the most that this process allocated and reserved."""
    kind = device_type()
    if kind not in ("cuda", "npu"):
        return {}
    module = torch.get_device_module(kind)
    return {
        "total": int(module.mem_get_info()[1]),
        "allocated": int(module.max_memory_allocated()),
        "reserved": int(module.max_memory_reserved()),
    }


def _end_other_ranks(progress: Path) -> None:
    """End the other processes, which wait for this one, and the launcher with its traceback."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    heartbeat.end_all(progress, but=os.getpid())
    if SUPERVISOR in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)
