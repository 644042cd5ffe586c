"""train_phase: train one phase to its end, and publish the newest checkpoint as the phase's.

The training itself runs in processes that `accelerate launch` starts (zerotrain.training.rank).
This process holds the lock, hands a signal on as a request to stop, and returns the exit code that
launchers lose.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerotrain import artifact, compiled_ops
from zerotrain.artifact import Artifact
from zerotrain.errors import EXIT_UNFINISHED, PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.machine.detect import detect
from zerotrain.model_sizes import TRAINED
from zerotrain.sources import source_digest
from zerotrain.supervise import supervise
from zerotrain.training import (
    lock,
    machine_check,
    nvme_check,
    preflight,
    progress_folder,
    swap_folder,
    validation_history,
)

RANK = "zerotrain.training.rank"
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
    parents = {
        "launch": artifact.read(launch, "launch"),
        "base": artifact.read(base, "base"),
        "cache": artifact.read(cache, "cache"),
    }
    if start is not None:
        parents["start"] = artifact.read(start, "state")
    phase = read_run_yaml(parents["launch"].path("run.yaml"))
    held = lock.take(progress)
    try:
        own = fingerprint(phase, parents)
        preflight.check_progress(progress, own, phase)
        said = preflight.check_start(parents["start"], phase) if start is not None else []
        if aside := progress_folder.settle(progress, own):
            said.append(aside)
        for line in said:
            print(line, file=sys.stderr, flush=True)
        for leftover in (progress_folder.STOP, progress_folder.EXIT):
            (progress / leftover).unlink(missing_ok=True)
        if progress_folder.end_step(progress, phase.until_step, phase.validation) is None:
            code = _launch(phase, launch, base, cache, start, progress)
            if code != 0:
                return code
        _publish(progress, phase, parents, output)
        return 0
    finally:
        held.release()


def fingerprint(phase: ResolvedPhase, parents: dict[str, Artifact]) -> dict[str, Any]:
    """What the numbers of a phase depend on, whatever it is called and wherever it ends."""
    return {
        **phase.numbers(),
        "base": artifact.digest(parents["base"].content["parts"]),
        "cache": parents["cache"].identity,
        "start": parents["start"].identity if "start" in parents else None,
        "code": source_digest(RANK, f"zerotrain.families.{phase.family}"),
    }


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
    progress: Path,
) -> int:
    _check_machine(phase, launch, base)
    if phase.engine == "deepspeed":
        compiled_ops.build()  # set-up has done it, unless this is another processor
    command = [
        *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"),
        *("--config_file", str(launch / "accelerate.yaml")),
        *("--main_process_port", str(machine_check.main_process_port(phase, launch))),
        *("--module", RANK),
        *("--launch", str(launch), "--base", str(base), "--cache", str(cache)),
        *("--progress", str(progress)),
    ]
    if resume := progress_folder.newest_whole(progress, phase.until_step):
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
    with _swap_folder(phase, launch, base) as swapping:
        code = supervise(
            [*command, *swapping],
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
        )
    left = progress / progress_folder.EXIT
    if left.is_file():
        ending = json.loads(left.read_text())
        if ending["code"] == EXIT_UNFINISHED:
            print(
                f"{phase.phase}: unfinished: {ending['reason']} at step "
                f"{progress_folder.newest_step(progress, phase.until_step)} of "
                f"{phase.until_step}; run the same command to go on",
                file=sys.stderr,
                flush=True,
            )
        return int(ending["code"])
    if code:
        print(
            f"ERROR: phase {phase.phase}: its training process ended without a word to us (the "
            f"launcher's code is {code}); newest checkpoint: step "
            f"{progress_folder.newest_step(progress, phase.until_step) or 'none'}\n"
            "  Hint: without a traceback above, the system has killed it, most often for memory: "
            "see `dmesg`, lower global_batch_size or set gradient_accumulation_steps; "
            "the same command goes on from that checkpoint",
            file=sys.stderr,
            flush=True,
        )
    return code


def _check_machine(phase: ResolvedPhase, launch: Path, base: Path) -> None:
    """What the machine cannot do is refused before a device or an hour is spent on it."""
    machine = detect()
    said = machine_check.check(phase, machine)
    if "cpu" in (phase.offload_optimizer, phase.offload_param):
        needed = swap_folder.needed_bytes(phase, artifact.read(base, "base", verify=False), "cpu")
        said += machine_check.check_host_memory(phase, machine, needed)
    if swap_folder.swaps(phase):
        machine_check.check_locked_memory(phase, machine, launch)
    for line in said:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _swap_folder(phase: ResolvedPhase, launch: Path, base: Path) -> Iterator[list[str]]:
    """The rank's arguments for swapping to a disk: a folder of its own, on a disk that is right."""
    if not swap_folder.swaps(phase):
        yield []
        return
    needed = swap_folder.needed_bytes(phase, artifact.read(base, "base", verify=False))
    with swap_folder.swap_folder(phase, needed) as (folder, said):
        for line in said:
            print(line, file=sys.stderr, flush=True)
        compiled_ops.build_swap_op()
        if passed := nvme_check.check(phase, launch, folder):
            print(passed, file=sys.stderr, flush=True)
        yield ["--swap", str(folder)]


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
    with artifact.publish(output, "checkpoint", parents=parents) as draft:
        for name, entry in rolling.files.items():
            artifact.link_or_copy(rolling.path(name), draft.folder / name)
            draft.known[name] = entry["sha256"]
        if rolling.folder != progress_folder.step_folder(progress, phase.until_step):
            draft.content = {"until": phase.until_step}  # all that was asked for is in it
