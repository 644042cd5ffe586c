"""What a training process does about an exception: a sentence, a code, an end for the others."""

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
from zerotrain.machine.device import device_type
from zerotrain.supervise import SUPERVISOR
from zerotrain.training import ending, failures, lock, pulse


def failed(error: Exception, launch: Path, progress: Path) -> int:
    """Answer for an exception that ended this process's training.

    Returns:
        The exit code: 2 where the user can mend it, 1 where a process is lost or hangs.

    Raises:
        Exception: the same, if it is none that is known: its traceback is for us.
    """
    supervised = SUPERVISOR in os.environ
    if isinstance(error, PipelineError):
        if ending.leave(progress, EXIT_USER_ERROR, error.what):
            _say(error)
        _end_the_others(progress)
        return EXIT_USER_ERROR
    failure = failures.recognise(error)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if failure is None or (failure.kind == failures.LOST and alone):
        raise error  # a single process has lost no other: its traceback says what it had
    phase = read_run_yaml(launch / "run.yaml")
    found = failures.sentence(failure, phase.phase, str(error))
    if failure.kind == failures.DEVICE_MEMORY:
        found = PipelineError(found.what, hint=_less_on_the_device(phase))
    if failure.kind == failures.LOST:
        if supervised:
            # The launcher knows which process died, and of what, unless a network came between.
            said = failures.shortened(str(error))
            print(f"rank {os.environ.get('RANK', '0')}: {said}", file=sys.stderr, flush=True)
            os._exit(failures.EXIT_FAULT)
        time.sleep(pulse.BEAT_SECONDS)
    of_others = failure.kind in (failures.LOST, failures.TIMEOUT)
    if of_others and (who := pulse.who_hangs(progress, time.time(), but=os.getpid())):
        found = PipelineError(f"{found.what}; {who}", hint=found.hint)
    # The planner, which knows what would fit, takes memory and time that are not a rank's.
    later = supervised and failure.kind in failures.MEMORY
    hint, kind = (found.hint, failure.kind) if later else ("", "")
    measured = _device_memory() if failure.kind == failures.DEVICE_MEMORY else {}
    if ending.leave(progress, failure.code, found.what, hint, kind, measured) and not later:
        _say(found)
    _end_the_others(progress)
    if of_others:
        lock.release_all()
        os._exit(failure.code)  # what is under way with the others would be waited for again
    return failure.code


def _less_on_the_device(phase: ResolvedPhase) -> str:
    """What can be said without a plan."""
    return (
        f"raise gradient_accumulation_steps above {phase.gradient_accumulation_steps}, set "
        "gradient_checkpointing: true, or go on with less on the device: `zerotrain switch "
        f"{phase.run} --to zero2_offload`, then zero3_offload"
    )


def _device_memory() -> dict[str, int]:
    """Bytes of the device: all there is, and the most that this process had taken."""
    kind = device_type()
    if kind not in ("cuda", "npu"):
        return {}
    module = torch.get_device_module(kind)
    return {
        "total": int(module.mem_get_info()[1]),
        "allocated": int(module.max_memory_allocated()),
        "reserved": int(module.max_memory_reserved()),
    }


def _end_the_others(progress: Path) -> None:
    """Other processes wait for this one; a launcher would print a traceback for it."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    pulse.end_all(progress, but=os.getpid())
    if SUPERVISOR in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)


def _say(error: PipelineError) -> None:
    print(error, file=sys.stderr, flush=True)
