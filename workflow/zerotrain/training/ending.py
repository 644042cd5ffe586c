"""How a training ended: what its processes leave, and what the stage that started them says of it.

A launcher loses exit codes and the reason; both go through the progress folder.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zerotrain.errors import PipelineError
from zerotrain.machine.host import oom_kills
from zerotrain.training import failures, pulse
from zerotrain.training.progress_folder import ENDED, EXIT, newest_step

GOES_ON = "training goes on"
"""In what a training says of a failure that does not end it, a tracker's for one."""


@dataclass(frozen=True)
class Left:
    """exit.json: the ending that a process has said, or the stage's watch."""

    code: int
    reason: str
    hint: str = ""
    """Empty where the process has said both itself."""
    kind: str = ""
    """Of zerotrain.training.failures, where the answer needs more than the process knows."""
    measured: dict[str, int] = field(default_factory=dict)
    """Bytes of the device at an out of memory: total, allocated, asked."""


def leave(
    progress: Path,
    code: int,
    reason: str,
    hint: str = "",
    kind: str = "",
    measured: Mapping[str, int] | None = None,
) -> bool:
    """Leave the exit code to the stage: a launcher would lose it and print a traceback.

    Returns:
        Whether this process is the first one to say how the training ended.
    """
    more = {"hint": hint, "kind": kind, "measured": dict(measured or {})}
    found = {"code": code, "reason": reason, **{key: value for key, value in more.items() if value}}
    try:
        with (progress / EXIT).open("x") as stream:
            json.dump(found, stream)
    except FileExistsError:
        return False
    except OSError:  # a full or read-only disk: the sentence goes to the log alone
        return True
    return True


def read_left(progress: Path) -> Left | None:
    """What was left, if anything."""
    try:
        return Left(**json.loads((progress / EXIT).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def unfinished(phase: str, progress: Path, until: int, reason: str) -> str:
    """A sentence about a training that goes on when it is started again."""
    return (
        f"{phase}: unfinished: {reason} at step {newest_step(progress, until)} of {until}; run the "
        "same command to go on"
    )


def clear(progress: Path) -> None:
    """Forget how an earlier start ended."""
    for path in (progress / EXIT, *progress.glob(ENDED)):
        path.unlink(missing_ok=True)
    pulse.clear(progress)


class Casualties:
    """What became of a launch that left no word; made before it begins."""

    def __init__(self) -> None:
        self._killed_before = oom_kills()

    def explain(
        self, phase: str, progress: Path, until: int, code: int, last_lines: Iterable[str]
    ) -> PipelineError:
        """The ending in words.

        Args:
            phase: The phase's name.
            progress: Folder of the progress.
            until: Step of the phase's end.
            code: The launcher's exit code.
            last_lines: The end of what the processes said.
        """
        step = newest_step(progress, until)
        newest = f"newest checkpoint: step {step}" if step else "no checkpoint was saved yet"
        ended = ended_ranks(progress)
        killed = {rank: -code for rank, code in ended.items() if code < 0}
        # torchrun itself ends the others by SIGTERM, and what does not listen by SIGKILL.
        first = next(
            (r for r, n in killed.items() if n != signal.SIGTERM), next(iter(killed), None)
        )
        of_memory = first is not None and killed[first] == signal.SIGKILL and any(self._kills())
        known = failures.recognise_log(line for line in last_lines if GOES_ON not in line)
        # What was lost is no news where it is known who died; a kill for memory tells all.
        if known and not of_memory and (known[0].kind != failures.LOST or first is None):
            failure, line = known
            who = pulse.who_hung(progress) if failure.kind == failures.TIMEOUT else ""
            found = failures.sentence(failure, phase, line)
            return PipelineError(
                f"{found.what}{f'; {who}' if who else ''}; {newest}", hint=found.hint
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
                f"{_of_ranks(ended) or code}); {newest}",
                hint="a traceback above tells where: report it with the log; " + failures.GOES_ON,
            )
        name = signal.Signals(killed[first]).name
        why, hint = self._why(killed[first])
        return PipelineError(
            f"phase {phase}: rank {first} was killed by {name}{why}; {newest}", hint=hint
        )

    def _kills(self) -> tuple[int, int]:
        """Kills for memory since the launch: in our control group, and on the machine."""
        (group, system), (group_before, system_before) = oom_kills(), self._killed_before
        return group - group_before, system - system_before

    def _why(self, number: int) -> tuple[str, str]:
        """The cause of a signal, where the kernel tells it, and what to do."""
        again = f"; {failures.GOES_ON}"
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


def ended_ranks(progress: Path) -> dict[int, int]:
    """Exit codes by rank of the processes that did not end with 0, of all machines."""
    found: dict[str, int] = {}
    for path in sorted(progress.glob(ENDED)):
        with contextlib.suppress(OSError, ValueError):
            found |= json.loads(path.read_text())
    return {int(rank): int(code) for rank, code in found.items()}


def _of_ranks(ended: Mapping[int, int]) -> str:
    return ", ".join(f"{code} of rank {rank}" for rank, code in ended.items())
