"""One training process, as `accelerate launch` starts it: python -m zerotrain.training.rank.

It is the other half of the train_phase stage, which launches it and answers for its ending.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

import torch

from zerotrain.cache import read_cache
from zerotrain.checkpoint import Checkpoint
from zerotrain.errors import (
    EXIT_UNFINISHED,
    EXIT_USER_ERROR,
    PipelineError,
    device_out_of_memory,
)
from zerotrain.families import load_family
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.position import EMA, MASTER
from zerotrain.state import State
from zerotrain.supervise import SUPERVISOR, end_with_parent
from zerotrain.trained import choose_trained, refuse_other_parameters, trained_parameters
from zerotrain.training import preflight, progress_folder
from zerotrain.training.average import WeightAverage
from zerotrain.training.batches import Batches
from zerotrain.training.determinism import equal_bits
from zerotrain.training.engine import Engine, open_engine
from zerotrain.training.lock import hold_writer
from zerotrain.training.log import Log, NoLog, TrainingLog
from zerotrain.training.loop import Clock, train
from zerotrain.training.schedule import follows_horizon


def main(argv: list[str] | None = None) -> None:
    """Train a phase, from its newest checkpoint if it has one; leave exit.json."""
    parser = argparse.ArgumentParser(prog="zerotrain.training.rank", description=__doc__)
    parser.add_argument("--launch", type=Path, required=True, help="folder of the launch files")
    parser.add_argument("--base", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the cache")
    parser.add_argument("--start", type=Path, help="state of the phase before")
    parser.add_argument("--resume", type=Path, help="checkpoint of this phase, instead")
    parser.add_argument("--progress", type=Path, required=True, help="folder of the progress")
    parser.add_argument("--swap", type=Path, help="folder for what is swapped to a disk")
    arguments = parser.parse_args(argv)
    end_with_parent()
    first = os.environ.get("RANK", "0") == "0"
    writing = hold_writer(arguments.progress) if first else nullcontext()
    try:
        with writing:
            if first:  # what an orphan of an earlier start may have left after this one began
                (arguments.progress / progress_folder.EXIT).unlink(missing_ok=True)
            finished = run(**vars(arguments))
    except (PipelineError, torch.OutOfMemoryError) as caught:
        error = caught if isinstance(caught, PipelineError) else _out_of_memory(caught, arguments)
        if _leave(arguments.progress, EXIT_USER_ERROR, error.what):
            print(error, file=sys.stderr, flush=True)
        _end_the_others()
        return
    if not finished and first:
        _leave(arguments.progress, EXIT_UNFINISHED, "stopped on request; a checkpoint was written")


def _out_of_memory(error: torch.OutOfMemoryError, arguments: argparse.Namespace) -> PipelineError:
    phase = read_run_yaml(arguments.launch / "run.yaml")
    return device_out_of_memory(
        f"phase {phase.phase}",
        error,
        hint=f"raise gradient_accumulation_steps above {phase.gradient_accumulation_steps}, set "
        "gradient_checkpointing: true, or go on with less on the device: `zerotrain switch "
        f"{phase.run} --to zero2_offload`, then zero3_offload",
    )


def run(
    launch: Path,
    base: Path,
    cache: Path,
    progress: Path,
    start: Path | None = None,
    resume: Path | None = None,
    swap: Path | None = None,
) -> bool:
    """Train; whether the phase was finished. The stage has verified the folders it names."""
    stop = _StopRequest(progress)  # before what takes seconds: a signal must not be lost meanwhile
    phase = read_run_yaml(launch / "run.yaml")
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
        log = TrainingLog(progress, phase, records, clock.step, same_phase=same_phase)
    if clock.horizon != own_horizon and follows_horizon(phase):
        log.say(
            f"{phase.phase}: the learning rate keeps its horizon of {clock.horizon} steps although "
            f"the last phase now ends at {own_horizon}; set train.lr_scheduler_steps to change it"
        )
    log.say(
        f"{phase.phase}: {phase.preset} on {_devices(engine)}, steps {clock.step} to "
        f"{phase.until_step}, global batch {phase.global_batch_size}"
    )
    with equal_bits(phase.phase):
        finished = train(
            engine,
            family.objective(base, phase.objective),
            Batches(read_cache(cache, verify=False), phase),
            phase,
            clock,
            log,
            progress,
            stop,
            average,
        )
    log.close()
    return finished


def _devices(engine: Engine) -> str:
    return str(engine.device) if engine.world_size == 1 else f"{engine.world_size} processes"


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


class _StopRequest:
    """True once somebody has touched progress/stop or sent a signal."""

    def __init__(self, progress: Path) -> None:
        self._file = progress / progress_folder.STOP
        self._signalled = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def __call__(self) -> bool:
        return self._signalled or self._file.exists()


def _leave(progress: Path, code: int, reason: str) -> bool:
    """Leave the exit code to the stage: a launcher would lose it and print a traceback.

    Returns:
        Whether this process is the first one to say how the training ended.
    """
    try:
        with (progress / progress_folder.EXIT).open("x") as stream:
            json.dump({"code": code, "reason": reason}, stream)
    except FileExistsError:
        return False
    return True


def _end_the_others() -> None:
    """Other processes wait for this one, and end with the launcher; it would print a traceback."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and SUPERVISOR in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
