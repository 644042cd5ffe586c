"""This part of the workflow reads and checks the configurations of the runs.

OUTPUTS: none; for the other parts the runs, the folders RESULTS of a run and DATA of a dataset, and
what rules take: INPUTS, RESOURCES. Before Snakemake plans, file times are made to agree with
manifests. BEGAN is the time before all that was read.
"""

import os
import shutil
import sys
import time
from pathlib import Path

BEGAN = time.time()

# The package that lies here plans and does the jobs, whichever checkout the environment's own is of:
# `dvc exp run --temp` and DVC's queue work in copies of the project.
sys.path.insert(0, os.path.abspath("workflow"))
package_first = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))
os.environ.update(PYTHONPATH=package_first)

if shutil.which("zerotrain") is None:
    # Without an activated environment the command is in the folder of this Python.
    here = os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")])
    os.environ.update(PATH=here)

from zerotrain.machine.child_process import end_with_supervisor
from zerotrain.graph.dvc.record import make_writable
from zerotrain.graph.artifacts import Artifacts
from zerotrain.graph.currency import refresh
from zerotrain.graph.jobs import JobInputs, option, options
from zerotrain.graph.jobs import JobResources
from zerotrain.graph.runs import Runs, checked, config_file, hasten_plan
from zerotrain.graph.terminal.handler import replace_output
from zerotrain.graph.why import first_lines

hasten_plan()

CONFIG = config_file(workflow.configfiles)
# The default file is read here before Snakemake reads it, whose message names neither file nor line.
# A --configfile Snakemake has opened already: `zerotrain check`, which `make train` calls, comes first.
RUNS = Runs.read(workflow.configfiles, check=workflow.is_main_process)

if not workflow.configfiles:

    configfile: CONFIG


RUNS.check_values(config, workflow.configfiles)

RESULTS, DATA, SHARED = RUNS.results, RUNS.data, RUNS.shared
ARTIFACTS = Artifacts(RUNS)
INPUTS = JobInputs(RUNS, ARTIFACTS)
RESOURCES = JobResources(RUNS, workflow)

if workflow.is_main_process:
    end_with_supervisor()  # otherwise it would publish for a command that has ended
    checked(make_writable)(RUNS.by_name.values())
    CURRENCY = checked(refresh)(ARTIFACTS.planned.values())
    replace_output(workflow, CURRENCY, first_lines)


wildcard_constraints:
    **RUNS.wildcards,
