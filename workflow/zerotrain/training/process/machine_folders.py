"""Local resources of a machine for its training processes: ops, cache copy, swap folder."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from zerotrain import artifact
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.machine import compiled_ops
from zerotrain.machine.output import print_message
from zerotrain.training.process import nvme_check, scratch, swap_folder


@contextlib.contextmanager
def on_own_disks(
    words: Sequence[str], stop: Callable[[], bool], *, one_of_several: bool = False
) -> Iterator[list[str]]:
    """Yield a training process's arguments with this machine's folders, which last for the block.

    Args:
        words: The arguments that the stage gives to all machines.
        stop: Whether the training is to end.
        one_of_several: Whether other machines run a share of the phase's processes.

    Raises:
        PipelineError: the ops do not build, or the disk is not usable for swapping.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--launch", "--base", "--cache"):
        parser.add_argument(name, type=Path, required=True)
    named, others = parser.parse_known_args(words)
    phase = read_run_yaml(named.launch / "run.yaml")
    with ExitStack() as held:
        if phase.derived.engine == "deepspeed":
            compiled_ops.build()  # done at installation, unless the processor is a different one
            os.environ.update(compiled_ops.environment())
        cache = named.cache
        if phase.launch.scratch:
            cache, message = held.enter_context(
                scratch.copy_of_cache(phase.launch.scratch, cache, stop)
            )
            print_message(f"{phase.phase}: {message}")
        arguments = [
            "--launch",
            str(named.launch),
            "--base",
            str(named.base),
            "--cache",
            str(cache),
        ]
        machines = phase.launch.machines if one_of_several else 1
        swapping = held.enter_context(swap_arguments(phase, named.launch, named.base, machines))
        yield [*arguments, *others, *swapping]


@contextlib.contextmanager
def swap_arguments(
    phase: ResolvedPhase, launch: Path, base: Path, machines: int = 1
) -> Iterator[list[str]]:
    """Yield the rank's arguments for swapping: its own folder, on a disk that was checked."""
    if not phase.swaps:
        yield []
        return
    needed = swap_folder.needed_bytes(phase, artifact.read(base, "base", verify=False))
    with swap_folder.swap_folder(phase, needed // machines) as (folder, messages):
        for line in messages:
            print_message(line)
        compiled_ops.build_swap_op()
        if passed := nvme_check.check(phase, launch, folder):
            print_message(passed)
        yield ["--swap", str(folder)]
