"""`accelerate launch` that records how its processes ended and handles every signal.

python -m zerotrain.training.process.launcher PROGRESS <arguments of accelerate launch>

accelerate's own command turns a killed process into a traceback and dies of a signal that it should
forward. Here a killed process becomes an entry in PROGRESS/ended-*.json, and a signal becomes a
request to stop.

With --main_process_ip it is one of several launchers, one per machine of a Slurm job.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from accelerate.commands.launch import launch_command, launch_command_parser

from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.machine.child_process import SUPERVISOR, end_with_parent
from zerotrain.training.checkpointing.progress_folder import exit_codes_file
from zerotrain.training.process import ending
from zerotrain.training.process.lock import end_with_owner
from zerotrain.training.process.machine_folders import on_own_disks
from zerotrain.training.process.stop_request import StopRequest

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
    stop = StopRequest(progress, tell=True)
    # At a signal, torchrun would end the processes instead of letting them finish their step.
    arguments.signals_to_handle = "SIGQUIT"
    arguments.shutdown_timeout = GRACE_SECONDS
    logging.disable(logging.ERROR)  # torchrun repeats what ended-*.json says
    try:
        given = arguments.training_script_args
        with on_own_disks(given, stop, one_of_several=several) as own:
            arguments.training_script_args = own
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
    exit_codes_file(progress, arguments.machine_rank or 0).write_text(json.dumps(ended))
    return 1


def _join_as_machine(arguments: Namespace) -> None:
    """Take the machine's number from srun, and act as supervisor: the real one may be remote."""
    arguments.machine_rank = int(os.environ["SLURM_NODEID"])
    os.environ[SUPERVISOR] = str(os.getpid())


if __name__ == "__main__":
    sys.exit(main())
