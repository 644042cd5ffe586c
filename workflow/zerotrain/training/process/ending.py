"""How a training ended: what its processes leave, and how the stage that started them reports it.

A launcher loses exit codes and the reason, so both go through the progress folder. A process whose
exception ends the training prints the message, and ends the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from zerotrain.artifact.documents import read_record
from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.child_process import supervisor_pid
from zerotrain.machine.device import device_type
from zerotrain.machine.disk_errors import DiskError
from zerotrain.machine.host import oom_kills
from zerotrain.machine.output import print_message
from zerotrain.machine.processes import Number
from zerotrain.machine.regular_file import write_text
from zerotrain.training.checkpointing.progress_folder import (
    ENDED,
    EXIT,
    exit_codes_file,
    newest_step,
)
from zerotrain.training.process import failures, lock
from zerotrain.training.process.lock_file import give_name
from zerotrain.training.reporting import heartbeat

DRAFT = f"{EXIT}.new-"
CONTINUES = "training continues"
"""Part of the messages about failures that do not end the training, such as a tracker's."""


@dataclass(frozen=True)
class ExitRecord:
    """Content of exit.json: the ending as the process or the stage's watch recorded it."""

    code: Annotated[int, Field(ge=0, lt=256)]
    reason: str
    hint: str = ""
    """Empty if the process has printed the reason and the hint itself."""
    kind: str = ""
    """A kind of training.process.failures, if the answer needs more than the process knows."""
    measured: dict[str, Annotated[int, Field(ge=0)]] = field(default_factory=dict)
    """Bytes of the device at an out-of-memory error: total, allocated, reserved."""


def write_exit_record(
    progress: Path,
    code: int,
    reason: str,
    hint: str = "",
    kind: str = "",
    measured: Mapping[str, int] | None = None,
) -> bool:
    """Leave the exit code for the stage: a launcher would lose it and print a traceback.

    Returns:
        Whether this process is the first to record how the training ended.
    """
    more = {"hint": hint, "kind": kind, "measured": dict(measured or {})}
    record = {
        "code": code,
        "reason": reason,
        **{key: value for key, value in more.items() if value},
    }
    draft = progress / f"{DRAFT}{socket.gethostname()}-{os.getpid()}"
    try:
        # Write it as a whole: a process that finds the file kills this one.
        write_text(draft, json.dumps(record))
        give_name(draft, progress / EXIT)
    except FileExistsError:
        return False
    except (OSError, DiskError):  # full or read-only: the message goes only to the log
        return True
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return True


def read_exit_record(progress: Path) -> ExitRecord | None:
    """Return what a process or the watch left, if anything that is a record."""
    try:
        return read_record(progress / EXIT, ExitRecord)
    except (OSError, ValueError):
        return None


def describe_unfinished(phase: str, progress: Path, until: int, reason: str) -> str:
    """Return the message about a training that continues when it is started again."""
    return (
        f"{phase}: unfinished: {reason} at step {newest_step(progress, until)} of {until}; run the "
        "same command to continue"
    )


def clear(progress: Path) -> None:
    """Remove the records of how an earlier start ended."""
    for path in (progress / EXIT, *progress.glob(f"{DRAFT}*"), *progress.glob(ENDED)):
        path.unlink(missing_ok=True)
    heartbeat.clear(progress)


class LaunchDeath:
    """Cause of death of a launch that left no exit.json; create it before the launch."""

    def __init__(self) -> None:
        self._killed_before = oom_kills()

    def explain(
        self, phase: str, progress: Path, until: int, code: int, last_lines: Iterable[str]
    ) -> PipelineError:
        """Explain how the launch ended.

        Args:
            phase: The phase's name.
            progress: The progress folder.
            until: Step of the phase's end.
            code: The launcher's exit code.
            last_lines: The last lines of the processes' output.
        """
        step = newest_step(progress, until)
        newest = f"newest checkpoint: step {step}" if step else "no checkpoint was saved yet"
        ended = read_exit_codes(progress)
        killed = {rank: -code for rank, code in ended.items() if code < 0}
        # torchrun ends the others by SIGTERM, and those that do not respond by SIGKILL.
        first = next(
            (r for r, n in killed.items() if n != signal.SIGTERM), next(iter(killed), None)
        )
        of_memory = first is not None and killed[first] == signal.SIGKILL and any(self._kills())
        known = failures.recognise_log(line for line in last_lines if CONTINUES not in line)
        # A lost connection adds nothing if it is known which rank died, or that memory ran out.
        if known and not of_memory and (known[0].kind != failures.LOST or first is None):
            failure, line = known
            who = heartbeat.describe_past_hang(progress) if failure.kind == failures.TIMEOUT else ""
            message = failures.format_failure(failure, phase, line)
            return PipelineError(
                f"{message.what}{f'; {who}' if who else ''}; {newest}", hint=message.hint
            )
        if not ended and code - 128 in list(signal.Signals):
            why, hint = self._why(code - 128)
            return PipelineError(
                f"phase {phase}: the launcher of its processes was killed by "
                f"{signal.Signals(code - 128).name}{why}; {newest}",
                hint=hint,
            )
        if first is None:
            return PipelineError(
                f"phase {phase}: its training process ended without a word to us (exit code "
                f"{_format_exit_codes(ended) or code}); {newest}",
                hint="a traceback above tells where: report it with the log; " + failures.CONTINUES,
            )
        name = _signal_name(killed[first])
        why, hint = self._why(killed[first])
        return PipelineError(
            f"phase {phase}: rank {first} was killed by {name}{why}; {newest}", hint=hint
        )

    def _kills(self) -> tuple[int, int]:
        """Return the out-of-memory kills since the launch: in our cgroup, and on the machine."""
        (group, system), (group_before, system_before) = oom_kills(), self._killed_before
        return group - group_before, system - system_before

    def _why(self, number: int) -> tuple[str, str]:
        """Return the cause of a signal, if the kernel reports it, and a hint."""
        again = f"; {failures.CONTINUES}"
        less = (
            "lower global_batch_size or raise gradient_accumulation_steps, offload less to the "
            "CPU, or take a machine or a job with more memory"
        )
        group, system = self._kills()
        if number == signal.SIGKILL and group > 0:
            return ": the memory of its control group (a container's or a job's) is used up", (
                less + again
            )
        if number == signal.SIGKILL and system > 0:
            return ": the machine's memory is used up", less + again
        if number == signal.SIGKILL:
            return "", (
                "somebody has ended it, or the system for memory, which `dmesg` then says: "
                + less
                + again
            )
        if number == signal.SIGBUS:
            return ": what it had mapped is gone", (
                "a file was cut short, or shared memory (/dev/shm) or a disk is full: `df -h`"
                + again
            )
        if number in (signal.SIGILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE):
            return ": a compiled library has failed", (
                "`zerotrain build_ops --help` builds DeepSpeed's ops for this processor; else "
                "report it with the log" + again
            )
        return "", "somebody has ended it" + again


def read_exit_codes(progress: Path) -> dict[int, int]:
    """Return the exit codes by rank of the processes on all machines that did not end with 0."""
    codes: dict[int, int] = {}
    for path in sorted(progress.glob(ENDED)):
        with contextlib.suppress(OSError, ValueError):
            codes |= read_record(path, dict[Number, Annotated[int, Field(ge=-64, lt=256)]])
    return codes


def write_exit_codes(progress: Path, machine: int, codes: Mapping[int, int]) -> None:
    """Write the exit codes by rank of a machine's processes that did not end with 0."""
    write_text(exit_codes_file(progress, machine), json.dumps(codes))


def _signal_name(number: int) -> str:
    """Return a signal's name; Python knows none for most real-time signals."""
    known = number in list(signal.Signals)
    return signal.Signals(number).name if known else f"signal {number}"


def _format_exit_codes(ended: Mapping[int, int]) -> str:
    return ", ".join(f"{code} of rank {rank}" for rank, code in ended.items())


def report_failure(error: Exception, launch: Path, progress: Path) -> int:
    """Report an exception that ended this process's training.

    Returns:
        The exit code: 2 if the user can fix it, 1 if a process is lost or hangs.

    Raises:
        Exception: the same exception, if it is unknown: its traceback is for the developers.
    """
    supervised = supervisor_pid() != 0
    if isinstance(error, PipelineError):
        if write_exit_record(progress, EXIT_USER_ERROR, error.what):
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
    if write_exit_record(progress, failure.code, message.what, hint, kind, measured) and not later:
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
    import torch  # the stage reads endings without it

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
    if supervisor_pid():
        os.kill(os.getppid(), signal.SIGKILL)
