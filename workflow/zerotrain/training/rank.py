"""One training process, as our launcher starts it: python -m zerotrain.training.rank.

It is the other half of the train_phase stage, which launches it and answers for its ending. Started
by torchrun or srun instead, it does the stage's part, too (zerotrain.training.by_hand).
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from zerotrain.cache import read_cache
from zerotrain.checkpoint import Checkpoint
from zerotrain.errors import EXIT_UNFINISHED
from zerotrain.families import load_family
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.position import EMA, MASTER
from zerotrain.state import State
from zerotrain.supervise import SUPERVISOR, end_with_parent
from zerotrain.trained import choose_trained, refuse_other_parameters, trained_parameters
from zerotrain.training import ending, preflight, progress_folder
from zerotrain.training.average import WeightAverage
from zerotrain.training.batches import Batches
from zerotrain.training.checkpoint_room import DiskWatch
from zerotrain.training.clock import Clock
from zerotrain.training.determinism import equal_bits
from zerotrain.training.engine import open_engine
from zerotrain.training.failed import failed
from zerotrain.training.faster import allow_tf32
from zerotrain.training.lock import hold_writer
from zerotrain.training.log import Log, NoLog, TrainingLog
from zerotrain.training.loop import train
from zerotrain.training.meeting import meet
from zerotrain.training.pulse import Pulse
from zerotrain.training.saving import Saving
from zerotrain.training.schedule import follows_horizon
from zerotrain.training.start_lines import start_lines
from zerotrain.training.stop_request import StopRequest
from zerotrain.training.validation import open_validation


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
    stop = StopRequest(progress)
    phase = read_run_yaml(launch / "run.yaml")
    meet(phase)
    family = load_family(phase.family)
    source: Checkpoint | State | None = None
    if resume is not None:
        source = Checkpoint(resume, verify=False)
    elif start is not None:
        source = State(start, verify=False)
    exact = source is None and not phase.zero3_init
    if phase.zero3_init:
        from zerotrain.training.partitioned_model import load_partitioned

        model, read = load_partitioned(
            family, base, phase, launch / "deepspeed.json", source, swap=swap
        )
    else:
        model = choose_trained(
            family.load_model(base),
            phase.adapter,
            phase.frozen_parameters,
            phase.seed,
            phase.trainable_parameters,
        )
        if source is not None:
            _take_weights(model, source)
    engine = open_engine(model, phase, launch, exact=exact, swap=swap)
    if phase.zero3_init:
        if source is None:
            engine.load_masters(read)
        del read  # it has the source's files open
    own_horizon = phase.lr_scheduler_steps
    clock = Clock(0, 0, own_horizon)
    records, same_phase = None, isinstance(source, Checkpoint)
    if source is not None:
        position = source.position
        engine.load_masters(source.tensor)
        if not preflight.lacks_moments(position, source.slots, phase):
            engine.load_moments(source.tensor, position.optimizer_step, position.param_groups)
        if position.loss_scale and phase.mixed_precision == "fp16":
            engine.load_loss_scale(position.loss_scale)
        clock = Clock(position.step, position.samples, _horizon(phase, position.lr_scheduler_steps))
        records = source.artifact.folder / "records"
    average = None
    if phase.use_ema:
        known = source is not None and EMA in source.slots
        average = WeightAverage(engine, phase, source.tensor if source and known else None)
    source = None  # an open file keeps its disk space when the checkpoint is pruned
    log: Log = NoLog()
    if engine.rank == 0:
        log = TrainingLog(
            progress,
            phase,
            records,
            clock.step,
            clock.samples,
            engine.device,
            same_phase=same_phase,
        )
    if clock.horizon != own_horizon and follows_horizon(phase):
        log.say(
            f"{phase.phase}: the learning rate keeps its horizon of {clock.horizon} steps although "
            f"the last phase now ends at {own_horizon}; set train.lr_scheduler_steps to change it"
        )
    if engine.rank == 0:
        for line in start_lines(model, engine, phase, clock.step, progress):
            log.say(f"{phase.phase}: {line}")
    low = None
    if engine.rank == 0 and phase.disk_low_threshold:
        low = DiskWatch(progress, phase.disk_low_threshold, log.say)
    if pulse:
        pulse.clock = clock
    opened = read_cache(cache, verify=False)
    validation = open_validation(
        engine, family, base, opened, phase, log, progress, clock.step, resume, average
    )
    if without_effect := allow_tf32(phase, engine.device):
        log.say(without_effect)
    more_records = validation.write_records if validation else None
    try:
        with equal_bits(phase.phase):
            finished = train(
                engine,
                family.objective(base, phase.objective),
                Batches(opened, phase),
                phase,
                clock,
                log,
                Saving(engine, phase, log, progress, average, more_records),
                lambda: stop() or bool(low and low()),
                average,
                validation,
            )
        if validation:
            validation.close(finished)
        return finished
    finally:
        log.close()


def _take_weights(model: object, source: Checkpoint | State) -> None:
    """Fill the model's trained parameters before an engine is built around it."""
    assert isinstance(model, torch.nn.Module)
    parameters = trained_parameters(model)
    refuse_other_parameters(
        source.shapes, {n: list(p.shape) for n, p in parameters.items()}, source.artifact.folder
    )
    with torch.no_grad():
        for name in source.names:
            parameters[name].copy_(source.tensor(name, MASTER))


def _horizon(phase: ResolvedPhase, kept: int) -> int:
    """The schedule's horizon: the user's word, else the one that training began with."""
    own = phase.lr_scheduler_steps
    # A state of elsewhere names no horizon.
    return own if phase.sources["lr_scheduler_steps"][0] == "user" or kept == 0 else kept


if __name__ == "__main__":
    if SUPERVISOR in os.environ:
        main()  # a launcher would print a traceback for a code; the stage returns what is left
    else:
        from zerotrain.training.by_hand import by_hand

        sys.exit(by_hand(read_arguments(), train_rank))
