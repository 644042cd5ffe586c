"""This part of the workflow provides the base model.

OUTPUTS: results/<run>/base/manifest.json, and of runs that share a dataset under a name of its own
results/data/<data.name>/base/manifest.json, whose encoders fill the cache
"""


rule build_base:
    """Building the base model from the seed, or taking it from a folder or hub."""
    input:
        dataset=INPUTS.base_dataset,
        model=INPUTS.base_files,
    output:
        manifest=f"{RESULTS}/base/manifest.json",
    log:
        f"{RESULTS}/logs/build_base.log",
    benchmark:
        f"{RESULTS}/benchmarks/build_base.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: RESOURCES.stage_threads
    resources:
        **RESOURCES.memory("build_base"),
        runtime=RESOURCES.minutes(120),
    params:
        **PARAMETERS.settings("build_base"),
        version=version_of("build_base"),
        config_file=PARAMETERS.config_file,
        with_dataset=option("--dataset", "dataset"),
    shell:
        """
        zerotrain --log {log:q} build_base \
            --config {params.config_file:q} \
            --output {output.manifest:q} {params.with_dataset}
        """


use rule build_base as build_shared_base with:
    output:
        manifest=f"{DATA}/base/manifest.json",
    log:
        f"{SHARED}/logs/build_shared_base.log",
    benchmark:
        f"{SHARED}/benchmarks/build_shared_base.tsv"
