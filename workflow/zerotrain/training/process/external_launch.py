"""Training launched by torchrun, srun or no launcher: its processes also do the stage's part.

torchrun --nproc_per_node 2 -m zerotrain.training.rank --launch ... --base ... --cache ...
    --progress ...
srun -n 2 python -m zerotrain.training.rank ...

The first process holds the lock, checks the progress and chooses the checkpoint; each process
returns the exit code itself. `train_phase` publishes the result afterwards.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed

from zerotrain.errors import EXIT_UNFINISHED, EXIT_USER_ERROR, PipelineError
from zerotrain.launch import zero
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import compiled_ops
from zerotrain.machine.output import print_message
from zerotrain.training import ranks
from zerotrain.training.checkpointing import checkpoint_room
from zerotrain.training.checkpointing.preflight import read_inputs
from zerotrain.training.checkpointing.progress_folder import end_step, newest_intact
from zerotrain.training.process import ending, failures, lock, machines
from zerotrain.training.process.machines import adopt_single, adopt_slurm, init_process_group
from zerotrain.training.process.start import check_room, prepare

ANSWERS = "zerotrain/answers"
"""Key of the number of processes that know how the first one has ended."""
ANSWER_SECONDS = 60
"""Time after which the first process ends without the others' answers."""


@dataclass(frozen=True)
class _Preparation:
    """Result of the first process's preparation, broadcast to the others."""

    finished: bool = False
    resume: Path | None = None
    what: str = ""
    """Message of a user error or a failure; empty without an error."""
    hint: str = ""
    code: int = EXIT_USER_ERROR


def train_externally_launched(
    arguments: argparse.Namespace, train: Callable[[argparse.Namespace], int]
) -> int:
    """Prepare a phase, train it, and print how it ended.

    Args:
        arguments: Arguments of a training process; --resume is chosen here if it is not given.
        train: Trains with such arguments, and returns the exit code.

    Returns:
        The process's exit code: 0, 85 if the phase is unfinished, 2 or 1 if it failed.
    """
    adopt_slurm(os.environ, str(arguments.launch))
    adopt_single(os.environ)
    first = os.environ["RANK"] == "0"
    with ExitStack() as held:
        try:
            phase = read_run_yaml(arguments.launch / "run.yaml")
            _set_up_environment(phase)
        except PipelineError as error:
            if first:
                print_message(error)
            return EXIT_USER_ERROR
        try:
            init_process_group(phase)
            preparation = ranks.broadcast(_prepare(arguments, phase, held) if first else None)
            speaks = first
        except Exception as error:
            preparation = _describe_error(error, phase)
            speaks = first or not isinstance(error, PipelineError)  # all find a user error
        assert preparation is not None
        if preparation.what:
            if speaks:
                print_message(PipelineError(preparation.what, hint=preparation.hint))
            return preparation.code
        if preparation.finished:
            code = 0
        else:
            arguments.resume = preparation.resume
            code = train(arguments)
        if first:
            _report_end(code, phase, arguments.progress)
    return _wait_for_first_rank(code) if code in (0, EXIT_UNFINISHED) else code


def _wait_for_first_rank(code: int) -> int:
    """Wait until the first process has reported the ending and released its lock.

    torchrun and srun end all processes as soon as one has ended with a code.
    """
    try:
        ranks.broadcast(None)
        _answer_first_rank()
    except Exception:  # the first process has ended, and has printed why
        return code and failures.EXIT_FAULT
    return code


def _answer_first_rank() -> None:
    """Let the first process end once the others have received its broadcast.

    On a GPU it returns before anything is sent, and the end of a process breaks its connections.
    The store answers each call at once, so that no other process has to stay.
    """
    if not distributed.is_initialized():
        return
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank():
        store.add(ANSWERS, 1)
        return
    end = time.monotonic() + ANSWER_SECONDS
    while store.add(ANSWERS, 0) < distributed.get_world_size() - 1 and time.monotonic() < end:
        time.sleep(0.01)


def _set_up_environment(phase: ResolvedPhase) -> None:
    """Set up the environment that the stage gives to the processes it launches.

    Raises:
        PipelineError: the phase swaps to a disk; only the stage makes and clears the swap folder.
    """
    if phase.swaps:
        raise PipelineError(
            f"phase {phase.phase}: preset {phase.launch.preset} swaps to a disk, and its "
            "processes were not started by train_phase, which makes the folder",
            hint="start it by `zerotrain train_phase` or Snakemake",
        )
    os.environ.update(compiled_ops.environment())
    os.environ.update(zero.allocator_settings(phase, os.environ))
    threads = machines.thread_count(
        phase, int(os.environ.get("LOCAL_WORLD_SIZE") or phase.processes_per_machine)
    )
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)))
    torch.set_num_threads(threads)  # torch is imported already, with its own number


def _prepare(arguments: argparse.Namespace, phase: ResolvedPhase, held: ExitStack) -> _Preparation:
    """Prepare the training in the first process; return the result or error for the others."""
    progress: Path = arguments.progress
    try:
        checkpoint_room.check_writable(progress)
        held.callback(lock.take(progress, seconds=phase.launch.lock_lease).release)
        held.callback(lock.end_with_owner(progress, lambda: _end_without_lock(progress)))
        inputs = read_inputs(arguments.launch, arguments.base, arguments.cache, arguments.start)
        prepare(inputs, progress)
        resume = arguments.resume or newest_intact(progress, phase.derived.until_step)
        end = end_step(progress, phase)
        if end is None:
            check_room(phase, inputs.parents["base"], progress)
            if phase.derived.engine == "deepspeed":
                compiled_ops.build()  # before all processes of a machine build them at once
        return _Preparation(finished=end is not None, resume=resume)
    except Exception as error:
        return _describe_error(error, phase)


def _end_without_lock(progress: Path) -> None:
    """End this process, which has lost its lock to another process or to a user who removed it.

    The other processes, which wait for it at each step, are ended by their launcher.
    """
    try:
        lock.check_not_taken_over(progress)
        raise PipelineError(
            f"{progress}: the lock of this training was removed; it was ended",
            hint="start it again: it resumes from the newest checkpoint",
        )
    except PipelineError as error:
        print_message(error)
    finally:
        os._exit(EXIT_USER_ERROR)


def _describe_error(error: Exception, phase: ResolvedPhase) -> _Preparation:
    """Return an exception from before the training as a message that can be broadcast."""
    if isinstance(error, PipelineError):
        return _Preparation(what=error.what, hint=error.hint)
    if known := failures.recognise(error):
        failure = failures.format_failure(known, phase.phase, str(error))
        return _Preparation(what=failure.what, hint=failure.hint, code=known.code)
    traceback.print_exception(error)
    return _Preparation(
        what=f"phase {phase.phase}: could not be started: {type(error).__name__}: {error}",
        hint="the traceback above tells where: report it with the log",
        code=failures.EXIT_FAULT,
    )


def _report_end(code: int, phase: ResolvedPhase, progress: Path) -> None:
    record = ending.read_exit_record(progress)
    if code == EXIT_UNFINISHED and record:
        message = ending.describe_unfinished(
            phase.phase, progress, phase.derived.until_step, record.reason
        )
    elif code == 0:
        end = end_step(progress, phase)
        message = (
            f"{phase.phase}: trained to step {end}; the rule train_phase publishes it without "
            "training anything"
        )
    else:
        return
    print_message(message)
