"""A training that torchrun, srun or nobody launched: its processes do the stage's part as well.

torchrun --nproc_per_node 2 -m zerotrain.training.rank --launch ... --base ... --cache ...
    --progress ...
srun -n 2 python -m zerotrain.training.rank ...

The first process holds the lock, looks at the progress and chooses the checkpoint; each returns the
exit code itself. `train_phase` publishes afterwards what was trained.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain import compiled_ops
from zerotrain.errors import EXIT_UNFINISHED, EXIT_USER_ERROR, PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.training import checkpoint_room, ending, failures, lock, ranks, swap_folder
from zerotrain.training.meeting import adopt_single, adopt_slurm, meet
from zerotrain.training.progress_folder import end_step, newest_whole
from zerotrain.training.start import check_room, prepare, read_inputs


@dataclass(frozen=True)
class _Begun:
    """What the first process tells the others."""

    finished: bool = False
    resume: Path | None = None
    what: str = ""
    """Of a mistake or a failure."""
    hint: str = ""
    code: int = EXIT_USER_ERROR


def by_hand(arguments: argparse.Namespace, train: Callable[[argparse.Namespace], int]) -> int:
    """Prepare a phase, train it, and say how it ended.

    Args:
        arguments: Those of a training process; --resume is chosen here where it is not given.
        train: Trains with such arguments, and returns the exit code.

    Returns:
        The process's exit code: 0, 85 where the phase is unfinished, 2 or 1 where it failed.
    """
    adopt_slurm(os.environ)
    adopt_single(os.environ)
    first = os.environ["RANK"] == "0"
    with ExitStack() as held:
        try:
            phase = read_run_yaml(arguments.launch / "run.yaml")
            _take_over(phase)
        except PipelineError as error:
            if first:
                print(error, file=sys.stderr, flush=True)
            return EXIT_USER_ERROR
        try:
            meet(phase)
            found = ranks.broadcast(_begin(arguments, phase, held) if first else None)
        except Exception as error:
            begun = _refused(error, phase)
            if first or not isinstance(error, PipelineError):  # a mistake is found by all
                print(PipelineError(begun.what, hint=begun.hint), file=sys.stderr, flush=True)
            return begun.code
        assert found is not None
        if found.what:
            if first:
                print(PipelineError(found.what, hint=found.hint), file=sys.stderr, flush=True)
            return found.code
        if found.finished:
            code = 0
        else:
            arguments.resume = found.resume
            arguments.start = None if found.resume else arguments.start
            code = train(arguments)
        if first:
            _tell(code, phase, arguments.progress)
    return _leave_together(code) if code in (0, EXIT_UNFINISHED) else code


def _leave_together(code: int) -> int:
    """Wait until the first process has published, told, and given its lock back.

    torchrun and srun end all processes as soon as one has ended with a code.
    """
    try:
        ranks.broadcast(None)
    except Exception:  # the first process is gone, and has said why
        return code and failures.EXIT_FAULT
    return code


def _take_over(phase: ResolvedPhase) -> None:
    """What the stage gives the processes that it launches.

    Raises:
        PipelineError: the phase swaps to a disk, whose folder the stage makes and clears.
    """
    if swap_folder.swaps(phase):
        raise PipelineError(
            f"phase {phase.phase}: preset {phase.preset} swaps to a disk, and its processes were "
            "not started by train_phase, which makes the folder",
            hint="start it by `zerotrain train_phase` or Snakemake",
        )
    os.environ.update(compiled_ops.environment())
    threads = phase.num_cpu_threads_per_process
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)))
    torch.set_num_threads(threads)  # it has been imported, and with its own number


def _begin(arguments: argparse.Namespace, phase: ResolvedPhase, held: ExitStack) -> _Begun:
    """The first process's part, whose mistakes and failures the others are to hear of."""
    progress: Path = arguments.progress
    try:
        checkpoint_room.check_writable(progress)
        held.callback(lock.take(progress).release)
        inputs = read_inputs(arguments.launch, arguments.base, arguments.cache, arguments.start)
        prepare(inputs, progress)
        if phase.scratch:
            print(
                f"{phase.phase}: launch.scratch is for train_phase, which starts a launcher on "
                f"each machine: the cache is read from {arguments.cache}",
                file=sys.stderr,
                flush=True,
            )
        resume = arguments.resume or newest_whole(progress, phase.until_step)
        end = end_step(progress, phase.until_step, phase.validation)
        if end is None:
            check_room(phase, inputs.parents["base"], progress)
            if phase.engine == "deepspeed":
                compiled_ops.build()  # before all processes of a machine do it at once
        return _Begun(finished=end is not None, resume=resume)
    except Exception as error:
        return _refused(error, phase)


def _refused(error: Exception, phase: ResolvedPhase) -> _Begun:
    """What an exception before the training is, in words that can be handed on."""
    if isinstance(error, PipelineError):
        return _Begun(what=error.what, hint=error.hint)
    if known := failures.recognise(error):
        said = failures.sentence(known, phase.phase, str(error))
        return _Begun(what=said.what, hint=said.hint, code=known.code)
    traceback.print_exception(error)
    return _Begun(
        what=f"phase {phase.phase}: could not be started: {type(error).__name__}: {error}",
        hint="the traceback above tells where: report it with the log",
        code=failures.EXIT_FAULT,
    )


def _tell(code: int, phase: ResolvedPhase, progress: Path) -> None:
    left = ending.read_left(progress)
    if code == EXIT_UNFINISHED and left:
        said = ending.unfinished(phase.phase, progress, phase.until_step, left.reason)
    elif code == 0:
        end = end_step(progress, phase.until_step, phase.validation)
        said = (
            f"{phase.phase}: trained to step {end}; the rule train_phase publishes it without "
            "training anything"
        )
    else:
        return
    print(said, file=sys.stderr, flush=True)
