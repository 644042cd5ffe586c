"""`accelerate launch` that keeps how its processes ended and loses no signal.

python -m zerotrain.training.launcher PROGRESS <what accelerate launch takes>

accelerate's own command turns a killed process into a traceback and dies of a signal that it was to
hand on. Here the first becomes a line of PROGRESS/ended.json, and a signal a request to stop.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from accelerate.commands.launch import launch_command, launch_command_parser

from zerotrain.supervise import end_with_parent
from zerotrain.training.progress_folder import ENDED
from zerotrain.training.stop_request import StopRequest

GRACE_SECONDS = 5
"""What the other processes get to end where one has died: they wait for it and will not."""


def main(argv: list[str] | None = None) -> int:
    """Launch, and leave ended.json where a process did not end with 0.

    Returns:
        0, or 1 where a process ended otherwise.
    """
    words = sys.argv[1:] if argv is None else argv
    progress = Path(words[0])
    end_with_parent()
    StopRequest(progress, tell=True)
    arguments = launch_command_parser().parse_args(words[1:])
    # torchrun would end the processes at a signal instead of letting them finish their step.
    arguments.signals_to_handle = "SIGQUIT"
    arguments.shutdown_timeout = GRACE_SECONDS
    logging.disable(logging.ERROR)  # torchrun repeats what ended.json says
    try:
        launch_command(arguments)
    except subprocess.CalledProcessError as error:
        ended = {0: error.returncode}
    except Exception as error:
        failures = getattr(error, "failures", None)
        if failures is None:
            raise
        ended = {rank: failure.exitcode for rank, failure in failures.items()}
    else:
        return 0
    (progress / ENDED).write_text(json.dumps(ended))
    return 1


if __name__ == "__main__":
    sys.exit(main())
