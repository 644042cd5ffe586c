"""What a machine has of its own for its training processes: ops, a cache's copy, a swap folder."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from zerotrain import artifact, compiled_ops
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml
from zerotrain.training import nvme_check, scratch, swap_folder


@contextlib.contextmanager
def on_own_disks(
    words: Sequence[str], stop: Callable[[], bool], *, one_of_several: bool = False
) -> Iterator[list[str]]:
    """A training process's arguments, with this machine's folders for the time of the training.

    Args:
        words: Its arguments, as the stage gives them to all machines.
        stop: Whether the training is to end.
        one_of_several: Whether the phase's other machines have their share of the processes.

    Raises:
        PipelineError: the ops do not build, or the disk does not serve for what is swapped.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--launch", "--base", "--cache"):
        parser.add_argument(name, type=Path, required=True)
    named, others = parser.parse_known_args(words)
    phase = read_run_yaml(named.launch / "run.yaml")
    with ExitStack() as held:
        if phase.engine == "deepspeed":
            compiled_ops.build()  # set-up has done it, unless this is another processor
            os.environ.update(compiled_ops.environment())
        cache = named.cache
        if phase.scratch:
            cache, said = held.enter_context(scratch.copy_of_cache(phase.scratch, cache, stop))
            _say(f"{phase.phase}: {said}")
        found = ["--launch", str(named.launch), "--base", str(named.base), "--cache", str(cache)]
        machines = phase.machines if one_of_several else 1
        swapping = held.enter_context(swap_words(phase, named.launch, named.base, machines))
        yield [*found, *others, *swapping]


@contextlib.contextmanager
def swap_words(
    phase: ResolvedPhase, launch: Path, base: Path, machines: int = 1
) -> Iterator[list[str]]:
    """The rank's arguments for swapping to a disk: a folder of its own, on a disk that is right."""
    if not swap_folder.swaps(phase):
        yield []
        return
    needed = swap_folder.needed_bytes(phase, artifact.read(base, "base", verify=False))
    with swap_folder.swap_folder(phase, needed // machines) as (folder, said):
        for line in said:
            _say(line)
        compiled_ops.build_swap_op()
        if passed := nvme_check.check(phase, launch, folder):
            _say(passed)
        yield ["--swap", str(folder)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
