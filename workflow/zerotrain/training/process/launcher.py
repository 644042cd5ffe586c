"""`accelerate launch` that records how its processes ended and handles every signal.

python -m zerotrain.training.process.launcher PROGRESS <arguments of accelerate launch>

accelerate's own command turns a killed process into a traceback and dies of a signal that it should
forward. Here a killed process becomes an entry in PROGRESS/ended-*.json, and a signal becomes a
request to stop.

With --main_process_ip it is one of several launchers, one per machine of a Slurm job. Each prepares
its machine for the processes: DeepSpeed's ops, a folder for swapping.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from accelerate.commands.launch import launch_command, launch_command_parser

from zerotrain import artifact
from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine import compiled_ops
from zerotrain.machine.child_process import SUPERVISOR, end_with_parent, supervisor_mark
from zerotrain.machine.output import print_message
from zerotrain.training.process import ending, swap_folder
from zerotrain.training.process.lock import end_with_owner
from zerotrain.training.process.stop import StopRequest

GRACE_SECONDS = 5
"""Time that the other processes get to end after one has died and they wait for it in vain."""


def main(argv: list[str] | None = None) -> int:
    """Launch the processes, and write ended-*.json if a process did not end with 0.

    Returns:
        0; 1 if a process did not end with 0; 2 if this machine cannot run the phase.
    """
    words = sys.argv[1:] if argv is None else argv
    progress = Path(words[0])
    arguments = launch_command_parser().parse_args(words[1:])
    several = bool(arguments.main_process_ip)
    if several:
        _join_as_machine(arguments)
    else:
        end_with_parent()
    end_with_owner(progress)
    StopRequest(progress, tell=True)
    # At a signal, torchrun would end the processes instead of letting them finish their step.
    arguments.signals_to_handle = "SIGQUIT"
    arguments.shutdown_timeout = GRACE_SECONDS
    arguments.log_dir = os.devnull  # torchrun would leave a folder torchelastic_* in $TMPDIR
    logging.disable(logging.ERROR)  # torchrun repeats what ended-*.json says
    try:
        given = arguments.training_script_args
        with prepared_machine(given, one_of_several=several) as swapping:
            arguments.training_script_args = [*given, *swapping]
            launch_command(arguments)
    except PipelineError as error:
        ending.write_exit_record(progress, EXIT_USER_ERROR, error.what, error.hint)
        return EXIT_USER_ERROR
    except subprocess.CalledProcessError as error:
        ended = {0: error.returncode}
    except Exception as error:
        failures = getattr(error, "failures", None)
        if failures is None:
            raise
        ended = {rank: failure.exitcode for rank, failure in failures.items()}
    else:
        return 0
    ending.write_exit_codes(progress, arguments.machine_rank or 0, ended)
    return 1


def _join_as_machine(arguments: Namespace) -> None:
    """Take the machine's number from srun, and act as supervisor: the real one may be remote."""
    arguments.machine_rank = int(os.environ["SLURM_NODEID"])
    os.environ[SUPERVISOR] = supervisor_mark()


@contextlib.contextmanager
def prepared_machine(words: Sequence[str], *, one_of_several: bool = False) -> Iterator[list[str]]:
    """Yield the arguments that name this machine's swap folder; empty if nothing is swapped.

    Args:
        words: The arguments that the stage gives to all machines.
        one_of_several: Whether other machines run a share of the phase's processes.

    Raises:
        PipelineError: the ops do not build, or the disk is not usable for swapping.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--launch", "--base"):
        parser.add_argument(name, type=Path, required=True)
    named, _ = parser.parse_known_args(words)
    phase = read_run_yaml(named.launch / "run.yaml")
    if phase.derived.engine == "deepspeed":
        compiled_ops.build()  # done at installation, unless the processor is a different one
        os.environ.update(compiled_ops.environment())
    machines = phase.launch.machines if one_of_several else 1
    with swap_arguments(phase, named.base, machines) as swapping:
        yield swapping


@contextlib.contextmanager
def swap_arguments(phase: ResolvedPhase, base: Path, machines: int = 1) -> Iterator[list[str]]:
    """Yield the rank's arguments for swapping: its own folder, on a disk that was checked."""
    if not phase.swaps:
        yield []
        return
    needed = swap_folder.needed_bytes(phase, artifact.read(base, "base", verify=False))
    with swap_folder.swap_folder(phase, needed // machines) as (folder, messages):
        for line in messages:
            print_message(line)
        compiled_ops.build_swap_op()
        yield ["--swap", str(folder)]


if __name__ == "__main__":
    code = main()
    gc.freeze()  # Python would look through accelerate's and torch's objects once more as it ends
    sys.exit(code)
