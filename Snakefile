"""zerotrain: images and captions in, exported weights out; DeepSpeed may change at every phase.

`snakemake --cores all train` runs config/config.yaml, `--configfile FILE` another run. Each rule calls
one command of the package in workflow/zerotrain; `zerotrain --help` lists them.
"""

import gc
import os
import sys

from snakemake.utils import min_version

min_version("9.27.1")

# A graph is a million objects that live to the end: looking through them again and again takes a
# quarter of the time in which a sweep is planned.
gc.set_threshold(100_000)

# The package that lies here plans and does the jobs, whichever checkout the environment's own is of:
# `dvc exp run --temp` and DVC's queue work in copies of the project.
sys.path.insert(0, os.path.abspath("workflow"))
package_first = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))
os.environ.update(PYTHONPATH=package_first)


include: "rules/config.smk"
include: "rules/sources.smk"
include: "rules/inputs.smk"
include: "rules/resources.smk"
include: "rules/targets.smk"
include: "rules/prepare_dataset.smk"
include: "rules/build_base.smk"
include: "rules/base_of_data.smk"
include: "rules/cache_latents.smk"
include: "rules/render_launch.smk"
include: "rules/import_checkpoint.smk"
include: "rules/train_phase.smk"
include: "rules/export_weights.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"
include: "rules/running.smk"
include: "rules/rebuild.smk"
include: "rules/agreement.smk"


localrules:
    all,


# It stands here because Snakemake forgets a default target that an included file names.
rule all:
    """Everything of the run; what `snakemake` makes without a target."""
    default_target: True
    input:
        rules.train.input,


# Snakemake knows one of each, in whichever file.
onstart:
    checked(refuse_running)
    checked(REBUILDING.set_aside)
    checked(AGREEMENT.begin)


onsuccess:
    checked(AGREEMENT.end)
