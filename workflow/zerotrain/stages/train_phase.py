"""train_phase: train one phase to its end, and publish the newest checkpoint as the phase's.

The training itself runs in processes that `accelerate launch` starts (zerotrain.training.rank).
This process holds the lock, hands a signal on as a request to stop, and returns the exit code that
launchers lose.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from zerotrain import artifact, compiled_ops
from zerotrain.artifact import Artifact
from zerotrain.errors import EXIT_UNFINISHED, PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.detect import detect
from zerotrain.model_sizes import TRAINED
from zerotrain.source_commit import source_commit
from zerotrain.supervise import supervise
from zerotrain.tracker_names import check_installed
from zerotrain.training import (
    checkpoint_room,
    ending,
    failures,
    lock,
    machine_check,
    machines,
    progress_folder,
    pulse,
    swap_folder,
    validation_history,
)
from zerotrain.training.start import RANK, check_room, fingerprint, prepare, read_inputs
from zerotrain.training.watch import Watch

__all__ = ["allocator", "fingerprint", "train_phase"]

ADVICE = "zerotrain.plan.advice"
LAST_LINES = 200
"""Of what the processes said, kept for the failures that are known by their words alone."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
"""glibc takes tensors of 256 KiB and more from the system, and gives them back when they are freed
(mallopt(3)). By default it raises the limit with what is freed, up to 32 MiB, and keeps what is
smaller: a fifth more memory than is ever in use. Pages cost their time at each allocation: a model
of LARGE_MODEL computes far longer on what it allocates, one of a few MB would take half as long
again, and has no memory to save."""
LARGE_MODEL = 2**27
"""Bytes of the files of what is trained."""


def train_phase(
    launch: Path,
    base: Path,
    cache: Path,
    start: Path | None,
    progress: Path,
    output: Path,
) -> int:
    """Train a phase, or go on with it, and publish its checkpoint.

    Args:
        launch: Folder of the launch files.
        base: Folder of the base model.
        cache: Folder of the cached latents and text embeddings.
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
    held = lock.take(progress)
    try:
        prepare(inputs, progress)
        resume = progress_folder.newest_whole(progress, phase.until_step)
        if progress_folder.end_step(progress, phase.until_step, phase.validation) is None:
            check_room(phase, parents["base"], progress)
            code = _launch(phase, launch, base, cache, start, resume, progress)
            if code != 0:
                return code
        _publish(progress, phase, parents, output)
        return 0
    finally:
        held.release()


def allocator(base: Artifact) -> dict[str, str]:
    """Environment variables by which a training of this model has glibc give memory back."""
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
    job, said = machines.job_of(phase)
    here = phase.processes_per_machine if job else phase.num_processes
    _check_machine(phase, launch, base, here, said)
    command = [
        *machines.launcher(phase, launch, progress, job),
        *("--module", RANK),
        *("--launch", str(launch), "--base", str(base), "--cache", str(cache)),
        *("--progress", str(progress)),
    ]
    if resume is not None:
        command += ["--resume", str(resume)]
    elif start is not None:
        command += ["--start", str(start)]

    def ask_to_stop(number: int) -> None:
        (progress / progress_folder.STOP).touch()
        with contextlib.suppress(OSError):  # the terminal may be what is gone
            print(
                f"signal {number}: training stops after this step with a checkpoint; "
                "a second signal ends it at once",
                file=sys.stderr,
                flush=True,
            )

    threads = str(phase.num_cpu_threads_per_process)
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    casualties = ending.Casualties()
    watch = Watch(progress, phase.phase, phase.ddp_timeout)
    with watch:
        code = supervise(
            command,
            log=None,
            environment={
                **os.environ,
                **compiled_ops.environment(),
                **allocator(artifact.read(base, "base", verify=False)),
                # Threads are part of the numbers; a launcher or Snakemake must not choose them.
                **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
                "TOKENIZERS_PARALLELISM": "false",
            },
            on_signal=ask_to_stop,
            last_lines=last_lines,
        )
    if job and ending.ended_ranks(progress):
        code = failures.EXIT_FAULT  # srun's is that of what it ended itself
    pulse.end_all(progress)  # a stopped process does not see that it is alone
    return _answer(phase, base, progress, code, casualties, last_lines)


def _answer(
    phase: ResolvedPhase,
    base: Path,
    progress: Path,
    code: int,
    casualties: ending.Casualties,
    last_lines: Sequence[str],
) -> int:
    """Say how the training ended, where it has not done so itself; its exit code."""
    if code:
        lock.refuse_taken_over(progress)
    left = ending.read_left(progress)
    if left and left.code == EXIT_UNFINISHED:
        said = ending.unfinished(phase.phase, progress, phase.until_step, left.reason)
        print(said, file=sys.stderr, flush=True)
    elif left and left.kind in failures.MEMORY:
        print(_out_of_memory(phase, base, progress, left), file=sys.stderr, flush=True)
    elif left and left.hint:
        print(PipelineError(left.reason, hint=left.hint), file=sys.stderr, flush=True)
    elif not left and code > 128 and (progress / progress_folder.STOP).exists():
        step = progress_folder.newest_step(progress, phase.until_step) or "none"
        print(f"{phase.phase}: ended at once; newest checkpoint: step {step}", file=sys.stderr)
    elif not left and code:
        until = phase.until_step
        error = casualties.explain(phase.phase, progress, until, code, last_lines)
        print(error, file=sys.stderr, flush=True)
    return left.code if left else code


def _out_of_memory(
    phase: ResolvedPhase, base: Path, progress: Path, left: ending.Left
) -> PipelineError:
    """What the planner says of a phase that ran out of memory: the preset that fits."""
    step = progress_folder.newest_step(progress, phase.until_step)
    newest = f"newest checkpoint: step {step}" if step else "no checkpoint was saved yet"
    try:
        # By name, as families are: a plan decides nothing that is trained.
        advice = importlib.import_module(ADVICE)
        found = advice.after_out_of_memory(phase, base, step, left.measured, left.kind)
    except Exception:  # the answer that is known must not be lost for a better one
        return PipelineError(f"{left.reason}; {newest}", hint=left.hint)
    what = "; ".join([left.reason, *found.facts, newest])
    return PipelineError(what, hint=found.what_to_do or left.hint)


def _check_machine(
    phase: ResolvedPhase, launch: Path, base: Path, processes: int, said: list[str]
) -> None:
    """What the machine cannot do is refused before a device or an hour is spent on it.

    It has so many of the phase's processes; `said` is told besides what the check says.
    """
    check_installed(phase.report_to)
    machine = detect()
    said = said + machine_check.check(phase, machine, processes)
    if "cpu" in (phase.offload_optimizer, phase.offload_param):
        needed = swap_folder.needed_bytes(phase, artifact.read(base, "base", verify=False), "cpu")
        of_all = phase.num_processes // processes
        said += machine_check.check_host_memory(phase, machine, needed // of_all)
    if swap_folder.swaps(phase):
        machine_check.check_locked_memory(phase, machine, launch)
    for line in said:
        print(line, file=sys.stderr, flush=True)


def _chosen(progress: Path, end: int, phase: ResolvedPhase) -> Path:
    """The rolling checkpoint to publish of a phase that has ended at a step."""
    last = progress_folder.step_folder(progress, end)
    history = validation_history.read_history(last)
    if not (phase.validation and phase.validation["load_best_model_at_end"] and history):
        return last
    best = history.best(phase.validation)
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


def _publish(
    progress: Path, phase: ResolvedPhase, parents: dict[str, Artifact], output: Path
) -> None:
    """Give the last rolling checkpoint, or the best, its second name; it stays for extending."""
    end = progress_folder.end_step(progress, phase.until_step, phase.validation)
    if end is None:
        raise PipelineError(
            f"{progress}: training ended without a checkpoint of step {phase.until_step}",
            hint="look at the log of train_phase",
        )
    rolling = artifact.read(_chosen(progress, end, phase), "checkpoint")
    made_by = {"code": fingerprint(phase, parents)["code"], "commit": source_commit()}
    with artifact.publish(output, "checkpoint", parents=parents, made_by=made_by) as draft:
        for name, entry in rolling.files.items():
            artifact.link_or_copy(rolling.path(name), draft.folder / name)
            draft.known[name] = entry["sha256"]
        if rolling.folder != progress_folder.step_folder(progress, phase.until_step):
            draft.content = {"until": phase.until_step}  # all that was asked for is in it
