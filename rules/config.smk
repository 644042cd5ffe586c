"""This part of the workflow reads and checks the configurations of the runs.

OUTPUTS: none; the runs, and the folders RESULTS of a run and DATA of a dataset, for the other parts.
"""

import os
import shutil
import sys
from pathlib import Path

from snakemake.common.configfile import load_configfile

from zerotrain.config import parse_config
from zerotrain.config.runs import KEY, read_runs
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
    several = [KEY] == list(config)
    # Snakemake reads YAML 1.1, where `on` is true: the same file is the same text to both.
    as_read = dict(config) == dict(load_configfile(CONFIG))
    if len(workflow.configfiles) > 1 or not (
        several or as_read or [parse_config(dict(config), CONFIG)] == [*RUNS.values()]
    ):
        raise PipelineError(
            f"{CONFIG}: further values were given by --config or a second --configfile; "
            "the stages read one file and would not see them",
            hint="write the values into a copy of that file and name it with --configfile",
        )


# The default file is read here before Snakemake reads it, whose message names neither file nor line.
# A --configfile Snakemake has opened already: `zerotrain check`, which `make train` calls, comes first.
BY_FILE = checked(read_runs, Path(CONFIG))

if not workflow.configfiles:

    configfile: CONFIG


RUNS = {run.run: run for run in BY_FILE.values()}
FILES = {run.run: file for file, run in BY_FILE.items()}
BY_DATA = {}
for one in RUNS.values():
    BY_DATA.setdefault(one.data_name, one)

checked(refuse_other_values)


# The rules of several runs have a wildcard for them. Those of one name it, and can be targets.
several = len(RUNS) > 1
RESULTS = "results/{run}" if several else f"results/{next(iter(RUNS))}"
DATA = f"results/data/{'{data}' if several else next(iter(BY_DATA))}"
SHARED = "results/{data}" if several else RESULTS


def run_of(wildcards):
    """The run that a job is of; of a dataset and its caches the first of those that share them."""
    if data := wildcards.get("data"):
        return BY_DATA[data]
    return RUNS[wildcards.get("run") or next(iter(RUNS))]


def stage_threads(wildcards):
    """CPU threads of a stage of one process."""
    return run_of(wildcards).launch.num_cpu_threads_per_process or os.cpu_count()


if shutil.which("zerotrain") is None:
    # Without an activated environment the command lies beside this Python.
    here = os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")])
    os.environ.update(PATH=here)


wildcard_constraints:
    run="|".join(RUNS),
    data="|".join(BY_DATA),
    phase="|".join({phase.name: None for run in RUNS.values() for phase in run.phases}),
    size=r"\d+",
