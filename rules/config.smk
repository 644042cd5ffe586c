"""This part of the workflow reads and checks the configurations of the runs.

OUTPUTS: none; for the other parts the runs, the folders RESULTS of a run and DATA of a dataset, and
what rules take: INPUTS, PARAMETERS, RESOURCES.
"""

import os
import shutil
import sys
from pathlib import Path

# The package that lies here plans and does the jobs, whichever checkout the environment's own is of:
# `dvc exp run --temp` and DVC's queue work in copies of the project.
sys.path.insert(0, os.path.abspath("workflow"))
package_first = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))
os.environ.update(PYTHONPATH=package_first)

if shutil.which("zerotrain") is None:
    # Without an activated environment the command is in the folder of this Python.
    here = os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")])
    os.environ.update(PATH=here)

from zerotrain.pipeline.graph.inputs import JobInputs
from zerotrain.pipeline.graph.parameters import JobParameters, option, options
from zerotrain.pipeline.graph.resources import JobResources
from zerotrain.pipeline.graph.runs import Runs, config_file, hasten_plan
from zerotrain.pipeline.graph.versions import version_of
from zerotrain.pipeline.terminal.handler import replace_output
from zerotrain.pipeline.why import first_lines

hasten_plan()

if workflow.is_main_process:
    replace_output(workflow, first_lines)

CONFIG = config_file(workflow.configfiles)
# The default file is read here before Snakemake reads it, whose message names neither file nor line.
# A --configfile Snakemake has opened already: `zerotrain check`, which `make train` calls, comes first.
RUNS = Runs.read(workflow.configfiles, check=workflow.is_main_process)

if not workflow.configfiles:

    configfile: CONFIG


RUNS.check_values(config, workflow.configfiles)

RESULTS, DATA, SHARED = RUNS.results, RUNS.data, RUNS.shared
INPUTS = JobInputs(RUNS, updates=workflow.is_main_process)
PARAMETERS = JobParameters(RUNS)
RESOURCES = JobResources(RUNS, workflow)


wildcard_constraints:
    **RUNS.wildcards,
