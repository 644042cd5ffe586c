"""One training process, started by our launcher: python -m zerotrain.training.rank.

It is the other half of the train_phase stage, which launches it and handles its exit. Started by
torchrun or srun instead, it does the stage's part, too (training/process/external_launch.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from zerotrain.artifact.recipe import format_differences
from zerotrain.cache.reader import read_cache
from zerotrain.errors import EXIT_UNFINISHED
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.schedules import follows_horizon
from zerotrain.machine.child_process import end_with_parent, supervisor_pid
from zerotrain.models.families import load_family
from zerotrain.training.batches import Batches, ReadAhead
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.checkpointing.checkpoint_room import DiskWatch
from zerotrain.training.checkpointing.provenance import Provenance, describe_provenance
from zerotrain.training.checkpointing.saving import Saving
from zerotrain.training.engines.kernels import allow_tf32, use_deterministic_kernels
from zerotrain.training.loop import train
from zerotrain.training.process import ending
from zerotrain.training.process.ending import report_failure
from zerotrain.training.process.lock import hold_writer
from zerotrain.training.process.machines import init_process_group
from zerotrain.training.process.start_lines import start_details, start_lines
from zerotrain.training.process.stop import StopRequest
from zerotrain.training.reporting.heartbeat import Heartbeat
from zerotrain.training.reporting.log import Log, NoLog
from zerotrain.training.reporting.validation import open_validation
from zerotrain.training.setup import TrainingSetup, set_up_phase


def main(argv: list[str] | None = None) -> int:
    """Train a phase, from the named checkpoint if any; write exit.json unless it finishes.

    Returns:
        The exit code: 0 if finished, 85 if unfinished, 2 or 1 if failed.
    """
    return train_rank(read_arguments(argv))


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="zerotrain.training.rank", description=__doc__)
    parser.add_argument("--launch", type=Path, required=True, help="folder of the launch files")
    parser.add_argument("--base", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the cache")
    parser.add_argument("--start", type=Path, help="state of the phase before")
    parser.add_argument("--resume", type=Path, help="checkpoint of this phase, instead")
    parser.add_argument("--progress", type=Path, required=True, help="folder of the progress")
    parser.add_argument("--swap", type=Path, help="folder for what is swapped to a disk")
    return parser.parse_args(argv)


def train_rank(arguments: argparse.Namespace) -> int:
    """Do what `main` does, with parsed arguments."""
    end_with_parent()
    progress: Path = arguments.progress
    number = int(os.environ.get("RANK", "0"))
    with ExitStack() as stack:
        try:
            if number == 0:
                stack.enter_context(hold_writer(progress))
                # an orphan of an earlier start may have written it since this start
                (progress / progress_folder.EXIT).unlink(missing_ok=True)
            heartbeat = stack.enter_context(closing(Heartbeat(progress, number)))
            finished = run(**vars(arguments), heartbeat=heartbeat)
        except Exception as error:
            return report_failure(error, arguments.launch, progress)
    if finished:
        return 0
    if number == 0:
        reason = "stopped on request; a checkpoint was written"
        ending.write_exit_record(progress, EXIT_UNFINISHED, reason)
    return EXIT_UNFINISHED


def run(
    launch: Path,
    base: Path,
    cache: Path,
    progress: Path,
    start: Path | None = None,
    resume: Path | None = None,
    swap: Path | None = None,
    heartbeat: Heartbeat | None = None,
) -> bool:
    """Train; return whether the phase is finished. The stage has verified the folders."""
    stop = StopRequest(progress)  # before the slow steps below, which must not lose a signal
    phase = read_run_yaml(launch / "run.yaml")
    init_process_group(phase)
    family = load_family(phase.family)
    setup = set_up_phase(phase, family, launch, base, start, resume, swap)
    engine, counter = setup.engine, setup.counter
    if heartbeat:
        heartbeat.counter = counter
    without_effect = allow_tf32(phase, engine.device)
    provenance = Provenance()
    if engine.rank == 0:
        provenance = describe_provenance(
            phase, setup.model, engine.device, base=base, cache=cache, start=start, resume=resume
        )
    log = _open_log(phase, setup, progress, same_phase=resume is not None)
    if provenance.changed:
        log.say(_format_changed(phase, provenance, counter.step))
    if without_effect:
        log.say(without_effect)
    samples = read_cache(cache, verify=False)
    objective = family.objective(base, phase.derived.objective)
    validation = open_validation(
        engine, family, base, samples, phase, log, progress, counter.step, resume, setup.ema
    )
    more_records = validation.write_records if validation else None
    saving = Saving(engine, phase, log, progress, setup.ema, more_records, provenance)
    low = None
    if engine.rank == 0 and phase.train.disk_low_threshold:
        low = DiskWatch(progress, phase.train.disk_low_threshold, log.say)
    image_tokens = getattr(objective, "image_tokens", None)
    batches = Batches(samples, phase, image_tokens, first=counter.samples)
    if small := batches.describe_small_buckets():
        log.say(f"{phase.phase}: {small}")
    together = phase.train.global_batch_size // phase.train.gradient_accumulation_steps
    try:
        with use_deterministic_kernels(phase), ReadAhead(batches, together) as ahead:
            finished = train(
                engine,
                objective,
                ahead,
                phase,
                counter,
                log,
                saving,
                lambda: stop() or bool(low and low()),
                setup.ema,
                validation,
            )
        if validation:
            validation.close(finished)
        if low and low() and not finished and not stop():
            reason = "the disk has less free than disk_low_threshold; a checkpoint was written"
            ending.write_exit_record(progress, EXIT_UNFINISHED, reason)
        return finished
    finally:
        log.close()


def _open_log(
    phase: ResolvedPhase, setup: TrainingSetup, progress: Path, *, same_phase: bool
) -> Log:
    """Return the first process's log, after reporting what will happen; the others are silent."""
    engine, counter = setup.engine, setup.counter
    if engine.rank != 0:
        return NoLog()
    log = Log(
        progress,
        phase,
        setup.records,
        counter.step,
        counter.samples,
        engine.device,
        same_phase=same_phase,
    )
    if counter.horizon != phase.derived.lr_scheduler_steps and follows_horizon(phase.train):
        log.say(
            f"{phase.phase}: the learning rate keeps its horizon of {counter.horizon} steps "
            f"although the last phase now ends at {phase.derived.lr_scheduler_steps}; set "
            "train.lr_scheduler_steps to change it"
        )
    for line in start_lines(setup.model, engine, phase, counter.step, progress):
        log.say(f"{phase.phase}: {line}")
    for line in start_details(engine, phase, counter.step, progress):
        log.detail(f"{phase.phase}: {line}")
    return log


def _format_changed(phase: ResolvedPhase, provenance: Provenance, step: int) -> str:
    values = format_differences(provenance.changed)
    return f"{phase.phase}: from step {step} on something else than before, recorded: {values}"


if __name__ == "__main__":
    if supervisor_pid():
        main()  # a launcher prints a traceback for an exit code; the stage reads exit.json instead
        code = 0
    else:
        from zerotrain.training.process.external_launch import train_externally_launched

        code = train_externally_launched(read_arguments(), train_rank)
    # Everything is saved and printed. At a normal exit, communication threads that are not joined
    # would make C++ abort the process ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
