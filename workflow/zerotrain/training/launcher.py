"""`accelerate launch` that keeps how its processes ended and loses no signal.

python -m zerotrain.training.launcher PROGRESS <what accelerate launch takes>

accelerate's own command turns a killed process into a traceback and dies of a signal that it was to
hand on. Here the first becomes a line of PROGRESS/ended-*.json, and a signal a request to stop.

With --main_process_ip it is one of several, one on each machine of a Slurm job.
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
from zerotrain.supervise import SUPERVISOR, end_with_parent
from zerotrain.training import ending
from zerotrain.training.lock import end_with_holder
from zerotrain.training.machine_folders import on_own_disks
from zerotrain.training.progress_folder import ended_file
from zerotrain.training.stop_request import StopRequest

GRACE_SECONDS = 5
"""What the other processes get to end where one has died: they wait for it and will not."""


def main(argv: list[str] | None = None) -> int:
    """Launch, and leave ended-*.json where a process did not end with 0.

    Returns:
        0, or 1 where a process ended otherwise; 2 where this machine cannot do what is asked.
    """
    words = sys.argv[1:] if argv is None else argv
    progress = Path(words[0])
    arguments = launch_command_parser().parse_args(words[1:])
    several = bool(arguments.main_process_ip)
    if several:
        _as_one_of_several(arguments)
    else:
        end_with_parent()
    end_with_holder(progress)
    stop = StopRequest(progress, tell=True)
    # torchrun would end the processes at a signal instead of letting them finish their step.
    arguments.signals_to_handle = "SIGQUIT"
    arguments.shutdown_timeout = GRACE_SECONDS
    logging.disable(logging.ERROR)  # torchrun repeats what ended-*.json says
    try:
        given = arguments.training_script_args
        with on_own_disks(given, stop, one_of_several=several) as own:
            arguments.training_script_args = own
            launch_command(arguments)
    except PipelineError as error:
        ending.leave(progress, EXIT_USER_ERROR, error.what, error.hint)
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
    ended_file(progress, arguments.machine_rank or 0).write_text(json.dumps(ended))
    return 1


def _as_one_of_several(arguments: Namespace) -> None:
    """Take the machine's number from srun, and stand in for a supervisor that may be elsewhere."""
    arguments.machine_rank = int(os.environ["SLURM_NODEID"])
    os.environ[SUPERVISOR] = str(os.getpid())


if __name__ == "__main__":
    sys.exit(main())
