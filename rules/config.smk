"""This part of the workflow reads and checks the run's configuration.

OUTPUTS: none; CONFIG, RUN, RESULTS and DATA for the other parts.
"""

import os
import shutil
import sys
from pathlib import Path

from zerotrain.config import parse_config, read_config
from zerotrain.errors import EXIT_USER_ERROR, PipelineError

CONFIG = os.path.relpath(next(iter(workflow.configfiles), "config/config.yaml"))


def checked(function, *arguments):
    """What the function returns; a mistake of the user's ends here with its sentence."""
    try:
        return function(*arguments)
    except PipelineError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def refuse_other_values():
    """Values that do not stand in the one file that the stages read."""
    if len(workflow.configfiles) > 1 or parse_config(dict(config), CONFIG) != RUN:
        raise PipelineError(
            f"{CONFIG}: further values were given by --config or a second --configfile; "
            "the stages read one file and would not see them",
            hint="write the values into a copy of that file and name it with --configfile",
        )


# The default file is read here before Snakemake reads it, whose message names neither file nor line.
# A --configfile Snakemake has opened already: `zerotrain check`, which `make train` calls, comes first.
RUN = checked(read_config, Path(CONFIG))

if not workflow.configfiles:

    configfile: CONFIG


checked(refuse_other_values)


RESULTS = f"results/{RUN.run}"
DATA = f"results/data/{RUN.data_name}"
THREADS = RUN.launch.num_cpu_threads_per_process or os.cpu_count()

if shutil.which("zerotrain") is None:
    # Without an activated environment the command lies beside this Python.
    here = os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")])
    os.environ.update(PATH=here)


wildcard_constraints:
    phase="|".join(phase.name for phase in RUN.phases),
    size=r"\d+",
