"""This part of the workflow provides the base model.

OUTPUTS: results/<run>/base/manifest.json, and of runs that share a dataset under a name of its own
results/data/<data.name>/base/manifest.json, whose encoders fill the cache
"""


rule build_base:
    """Building the base model from the seed, or taking it from a folder or hub."""
    input:
        settings=f"{RESULTS}/settings/build_base.json",
        dataset=INPUTS.dataset_of_base(f"{RESULTS}/settings/build_base.json"),
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
        with_dataset=option("--dataset", "dataset"),
    shell:
        """
        zerotrain --log {log:q} build_base \
            --settings {input.settings:q} \
            --output {output.manifest:q} {params.with_dataset}
        """


use rule build_base as build_shared_base with:
    input:
        settings=f"{DATA}/settings/build_base.json",
        dataset=INPUTS.dataset_of_base(f"{DATA}/settings/build_base.json"),
    output:
        manifest=f"{DATA}/base/manifest.json",
    log:
        f"{SHARED}/logs/build_shared_base.log",
    benchmark:
        f"{SHARED}/benchmarks/build_shared_base.tsv"
