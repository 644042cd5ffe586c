"""train_phase: train one phase to its end, and publish its last or best checkpoint.

The training itself runs in processes that `accelerate launch` starts (zerotrain.training.rank).
This process holds the lock, turns a signal into a request to stop, and returns the exit code that
launchers lose.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.leftovers import remove_manifest
from zerotrain.config.trackers import check_installed
from zerotrain.errors import EXIT_UNFINISHED, PipelineError
from zerotrain.launch import zero
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import compiled_ops
from zerotrain.machine.child_process import supervise
from zerotrain.machine.detect import detect
from zerotrain.machine.regular_file import touch
from zerotrain.models.sizes import TRAINED
from zerotrain.training.checkpointing import checkpoint_room, progress_folder, published
from zerotrain.training.checkpointing.preflight import Inputs, read_inputs
from zerotrain.training.process import (
    ending,
    failures,
    lock,
    machine_check,
    machines,
    swap_folder,
)
from zerotrain.training.process.start import check_room, prepare
from zerotrain.training.process.watch import Watch
from zerotrain.training.reporting import heartbeat, validation_history

__all__ = ["allocator", "train_phase"]

RANK = "zerotrain.training.rank"
LAST_LINES = 200
"""Last lines of output that are kept for failures that only their text identifies."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
"""Makes glibc take tensors of 256 KiB and more from the system, and return them when they are freed
(mallopt(3)). By default it raises this limit with freed sizes, up to 32 MiB, and keeps smaller
ones: a fifth more memory than is ever in use. New pages cost time at each allocation. A model of
LARGE_MODEL computes far longer on what it allocates; one of a few MB would take half as long again,
and has no memory to save."""
LARGE_MODEL = 2**27
"""Bytes of the trained part's files."""


def train_phase(
    launch: Path,
    base: Path,
    cache: Path,
    start: Path | None,
    progress: Path,
    output: Path,
) -> int:
    """Train a phase, or continue it, and publish its checkpoint.

    Args:
        launch: Folder of the launch files.
        base: Folder of the base model.
        cache: Folder of the cache.
        start: Folder of the state that the phase continues; None for the first phase.
        progress: Folder of the rolling checkpoints, declared by no rule.
        output: Folder to publish the phase's checkpoint at.

    Returns:
        0; 85 if the training was stopped and is unfinished; else the training's own exit code.

    Raises:
        PipelineError: an input is not whole, another process trains here, or the machine cannot
            do what the phase asks.
    """
    inputs = read_inputs(launch, base, cache, start)
    phase, parents = inputs.phase, inputs.parents
    checkpoint_room.check_writable(progress)
    held = lock.take(progress, seconds=phase.launch.lock_lease)
    try:
        if published.keep(output, progress, inputs):
            return 0
        prepare(inputs, progress)
        resume = progress_folder.newest_intact(progress, phase.derived.until_step)
        if progress_folder.end_step(progress, phase) is None:
            check_room(phase, parents["base"], progress)
            # The published checkpoint has other values or an earlier end: the phase is unfinished.
            remove_manifest(output)
            code = _launch(phase, launch, base, cache, start, resume, progress)
            if code != 0:
                return code
        _publish(progress, inputs, output)
        return 0
    finally:
        held.release()


def allocator(base: Artifact) -> dict[str, str]:
    """Return environment variables with which glibc returns memory in training this model."""
    own = [base.path(name) for name in base.files if TRAINED.fullmatch(name)]
    return ALLOCATOR if sum(path.stat().st_size for path in own) >= LARGE_MODEL else {}


def _launch(
    phase: ResolvedPhase,
    launch: Path,
    base: Path,
    cache: Path,
    start: Path | None,
    resume: Path | None,
    progress: Path,
) -> int:
    job, lines = machines.job_of(phase)
    here = phase.processes_per_machine if job else phase.launch.num_processes
    _check_machine(phase, launch, base, here, lines)
    command = [
        *machines.launcher(phase, launch, progress, job),
        *("--module", RANK),
        *("--launch", str(launch), "--base", str(base), "--cache", str(cache)),
        *("--progress", str(progress)),
    ]
    if resume is not None:
        command += ["--resume", str(resume)]
    if start is not None:
        command += ["--start", str(start)]

    def ask_to_stop(number: int) -> None:
        touch(progress / progress_folder.STOP)
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(
                f"signal {number}: training stops after this step with a checkpoint; "
                "a second signal ends it at once",
                file=sys.stderr,
                flush=True,
            )

    threads = str(machines.thread_count(phase, here))
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    death = ending.LaunchDeath()
    watch = Watch(progress, phase.phase, phase.launch.ddp_timeout)
    with watch:
        code = supervise(
            command,
            log=None,
            environment={
                **os.environ,
                **compiled_ops.environment(),
                **allocator(artifact.read(base, "base", verify=False)),
                **zero.allocator_settings(phase, os.environ),
                # Results depend on threads; a launcher or Snakemake must not choose their number.
                **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
                "TOKENIZERS_PARALLELISM": "false",
            },
            on_signal=ask_to_stop,
            last_lines=last_lines,
        )
    if job and ending.read_exit_codes(progress):
        code = failures.EXIT_FAULT  # srun returns that of a process that it ended itself
    heartbeat.end_all(progress)  # a stopped process does not notice that it is alone
    return _answer(phase, base, progress, code, death, last_lines)


def _answer(
    phase: ResolvedPhase,
    base: Path,
    progress: Path,
    code: int,
    death: ending.LaunchDeath,
    last_lines: Sequence[str],
) -> int:
    """Report how the training ended if it did not do so itself, and return its exit code."""
    if code:
        lock.check_not_taken_over(progress)
    record = ending.read_exit_record(progress)
    if record and record.code == EXIT_UNFINISHED:
        sentence = ending.describe_unfinished(
            phase.phase, progress, phase.derived.until_step, record.reason
        )
        print(sentence, file=sys.stderr, flush=True)
    elif record and record.kind in failures.MEMORY:
        print(_out_of_memory(phase, base, progress, record), file=sys.stderr, flush=True)
    elif record and record.hint:
        print(PipelineError(record.reason, hint=record.hint), file=sys.stderr, flush=True)
    elif not record and code > 128 and (progress / progress_folder.STOP).exists():
        step = progress_folder.newest_step(progress, phase.derived.until_step) or "none"
        print(f"{phase.phase}: ended at once; newest checkpoint: step {step}", file=sys.stderr)
    elif not record and code:
        until = phase.derived.until_step
        error = death.explain(phase.phase, progress, until, code, last_lines)
        print(error, file=sys.stderr, flush=True)
    return record.code if record else code


def _out_of_memory(
    phase: ResolvedPhase, base: Path, progress: Path, record: ending.ExitRecord
) -> PipelineError:
    """Return the planner's advice to a phase that ran out of memory: the preset that fits."""
    step = progress_folder.newest_step(progress, phase.derived.until_step)
    newest = f"newest checkpoint: step {step}" if step else "no checkpoint was saved yet"
    try:
        from zerotrain.launch.planner import fit  # imports torch, only for a failed phase

        found = fit.advise_after_out_of_memory(phase, base, step, record.measured, record.kind)
    except Exception:  # the known reason must not be lost in looking for advice
        return PipelineError(f"{record.reason}; {newest}", hint=record.hint)
    what = "; ".join([record.reason, *found.facts, newest])
    return PipelineError(what, hint=found.what_to_do or record.hint)


def _check_machine(
    phase: ResolvedPhase, launch: Path, base: Path, processes: int, lines: list[str]
) -> None:
    """Reject a phase that the machine cannot run, before it takes a device or time.

    The machine runs `processes` of the phase; `lines` are printed before those of the check.
    """
    check_installed(phase.train.report_to)
    machine = detect()
    lines = lines + machine_check.check(phase, machine, processes)
    if "cpu" in (phase.derived.offload_optimizer, phase.derived.offload_param):
        needed = swap_folder.needed_bytes(phase, artifact.read(base, "base", verify=False), "cpu")
        of_all = phase.launch.num_processes // processes
        lines += machine_check.check_host_memory(phase, machine, needed // of_all)
    if phase.swaps:
        machine_check.check_locked_memory(phase, machine, launch)
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _chosen(progress: Path, end: int, phase: ResolvedPhase) -> Path:
    """Return the rolling checkpoint to publish for a phase that ended at this step."""
    last = progress_folder.step_folder(progress, end)
    history = validation_history.read_history(last)
    settings = phase.derived.validation
    if not (settings and settings["load_best_model_at_end"] and history):
        return last
    best = history.best(settings)
    if best is None:
        return last
    folder = progress_folder.step_folder(progress, best["step"])
    if not artifact.is_published(folder):
        raise PipelineError(
            f"{folder}: the phase's best checkpoint ({best['metric']} {best['value']:.6g}) is gone",
            hint="set validation.load_best_model_at_end to false, which publishes that of step "
            f"{end}",
        )
    print(
        f"{phase.phase}: step {best['step']} is published, the best of the phase "
        f"({best['metric']} {best['value']:.6g}), which ended at step {end}",
        file=sys.stderr,
        flush=True,
    )
    return folder


def _publish(progress: Path, inputs: Inputs, output: Path) -> None:
    """Publish the last or best rolling checkpoint, which stays for extending the phase."""
    phase = inputs.phase
    end = progress_folder.end_step(progress, phase)
    if end is None:
        raise PipelineError(
            f"{progress}: training ended without a checkpoint of step {phase.derived.until_step}",
            hint="look at the log of train_phase",
        )
    rolling = artifact.read(_chosen(progress, end, phase), "checkpoint")
    early = rolling.folder != progress_folder.step_folder(progress, phase.derived.until_step)
    published.publish(rolling, output, inputs, progress, early=early)
