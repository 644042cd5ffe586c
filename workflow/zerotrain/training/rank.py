"""One training process, as our launcher starts it: python -m zerotrain.training.rank.

It is the other half of the train_phase stage, which launches it and answers for its ending. Started
by torchrun or srun instead, it does the stage's part, too (zerotrain.training.by_hand).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from zerotrain.cache import read_cache
from zerotrain.errors import EXIT_UNFINISHED
from zerotrain.families import load_family
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.supervise import SUPERVISOR, end_with_parent
from zerotrain.training import ending, progress_folder
from zerotrain.training.batches import Batches
from zerotrain.training.checkpoint_room import DiskWatch
from zerotrain.training.determinism import equal_bits
from zerotrain.training.failed import failed
from zerotrain.training.faster import allow_tf32
from zerotrain.training.lock import hold_writer
from zerotrain.training.log import Log, NoLog, TrainingLog
from zerotrain.training.loop import train
from zerotrain.training.meeting import meet
from zerotrain.training.opening import Opened, open_phase
from zerotrain.training.pulse import Pulse
from zerotrain.training.saving import Saving
from zerotrain.training.schedule import follows_horizon
from zerotrain.training.start_lines import start_lines
from zerotrain.training.stop_request import StopRequest


def main(argv: list[str] | None = None) -> int:
    """Train a phase, from the checkpoint that is named if one is; leave exit.json.

    Returns:
        How it ended: 0, 85 where it is unfinished, 2 or 1 where it failed.
    """
    return train_rank(read_arguments(argv))


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
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
    """What main does, of arguments that have been read."""
    end_with_parent()
    progress: Path = arguments.progress
    number = int(os.environ.get("RANK", "0"))
    with ExitStack() as stack:
        try:
            if number == 0:
                stack.enter_context(hold_writer(progress))
                # what an orphan of an earlier start may have left after this one began
                (progress / progress_folder.EXIT).unlink(missing_ok=True)
            pulse = stack.enter_context(closing(Pulse(progress, number)))
            finished = run(**vars(arguments), pulse=pulse)
        except Exception as error:
            return failed(error, arguments.launch, progress)
    if finished:
        return 0
    if number == 0:
        said = "stopped on request; a checkpoint was written"
        ending.leave(progress, EXIT_UNFINISHED, said)
    return EXIT_UNFINISHED


def run(
    launch: Path,
    base: Path,
    cache: Path,
    progress: Path,
    start: Path | None = None,
    resume: Path | None = None,
    swap: Path | None = None,
    pulse: Pulse | None = None,
) -> bool:
    """Train; whether the phase was finished. The stage has verified the folders it names."""
    stop = StopRequest(progress)  # before what takes seconds: a signal must not be lost meanwhile
    phase = read_run_yaml(launch / "run.yaml")
    meet(phase)
    family = load_family(phase.family)
    opened = open_phase(phase, family, launch, base, start, resume, swap)
    engine, clock = opened.engine, opened.clock
    if pulse:
        pulse.clock = clock
    without_effect = allow_tf32(phase, engine.device)
    log = _open_log(phase, opened, progress, same_phase=resume is not None)
    if without_effect:
        log.say(without_effect)
    samples = read_cache(cache, verify=False)
    # By its name: it changes no trained number, and an edit of it must not set progress aside.
    opening = importlib.import_module("zerotrain.training.validation")
    validation = opening.open_validation(
        engine, family, base, samples, phase, log, progress, clock.step, resume, opened.average
    )
    more_records = validation.write_records if validation else None
    saving = Saving(engine, phase, log, progress, opened.average, more_records)
    low = None
    if engine.rank == 0 and phase.disk_low_threshold:
        low = DiskWatch(progress, phase.disk_low_threshold, log.say)
    try:
        with equal_bits(phase):
            finished = train(
                engine,
                family.objective(base, phase.objective),
                Batches(samples, phase),
                phase,
                clock,
                log,
                saving,
                lambda: stop() or bool(low and low()),
                opened.average,
                validation,
            )
        if validation:
            validation.close(finished)
        if low and low() and not finished and not stop():
            said = "the disk has less free than disk_low_threshold; a checkpoint was written"
            ending.leave(progress, EXIT_UNFINISHED, said)
        return finished
    finally:
        log.close()


def _open_log(phase: ResolvedPhase, opened: Opened, progress: Path, *, same_phase: bool) -> Log:
    """The first process's log, which says what will happen; the others are silent."""
    engine, clock = opened.engine, opened.clock
    if engine.rank != 0:
        return NoLog()
    log = TrainingLog(
        progress,
        phase,
        opened.records,
        clock.step,
        clock.samples,
        engine.device,
        same_phase=same_phase,
    )
    if clock.horizon != phase.lr_scheduler_steps and follows_horizon(phase):
        log.say(
            f"{phase.phase}: the learning rate keeps its horizon of {clock.horizon} steps although "
            f"the last phase now ends at {phase.lr_scheduler_steps}; set train.lr_scheduler_steps "
            "to change it"
        )
    for line in start_lines(opened.model, engine, phase, clock.step, progress):
        log.say(f"{phase.phase}: {line}")
    return log


if __name__ == "__main__":
    if SUPERVISOR in os.environ:
        main()  # a launcher would print a traceback for a code; the stage returns what is left
        code = 0
    else:
        from zerotrain.training.by_hand import by_hand

        code = by_hand(read_arguments(), train_rank)
    # All is saved and told. Communication threads that nobody joins would let C++ abort a process
    # that goes the usual way out ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
