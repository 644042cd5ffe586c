"""zerotrain: from images and captions to exported weights; each phase may use DeepSpeed differently.

`snakemake --cores all train` runs config/config.yaml, `--configfile FILE` another run. Each rule calls
one command of the package in workflow/zerotrain; `zerotrain --help` lists them.
"""

from snakemake.utils import min_version

min_version("9.26.0")


report: "rules/captions/workflow.rst"


include: "rules/config.smk"
include: "rules/targets.smk"
include: "rules/prepare_dataset.smk"
include: "rules/build_base.smk"
include: "rules/encode_shard.smk"
include: "rules/cache_latents.smk"
include: "rules/render_launch.smk"
include: "rules/import_checkpoint.smk"
include: "rules/train_phase.smk"
include: "rules/export_weights.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"
include: "rules/hooks.smk"


localrules:
    all,


# It is here because Snakemake forgets a default target that an included file names.
rule all:
    """Everything of the run; what `snakemake` makes without a target."""
    default_target: True
    input:
        rules.train.input,


# Snakemake knows one of each, in whichever file.
onstart:
    hooks.before_jobs(workflow, RUNS, ARTIFACTS)


onsuccess:
    hooks.after_jobs(workflow, Path(CONFIG), BEGAN)
