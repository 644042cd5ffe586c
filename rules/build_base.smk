"""This part of the workflow provides the base model.

OUTPUTS: results/<run>/base/manifest.json, and of runs that share a dataset under a name of its own
results/data/<data.name>/base/manifest.json, whose encoders fill the cache
"""


rule build_base:
    """Building the base model from the seed, or taking it from a folder or hub."""
    input:
        dataset=base_dataset,
        model=base_files,
        code=base_code(),
    output:
        manifest=f"{RESULTS}/base/manifest.json",
    log:
        f"{RESULTS}/logs/build_base.log",
    benchmark:
        f"{RESULTS}/benchmarks/build_base.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: stage_threads
    resources:
        **memory("build_base"),
        runtime=minutes(120),
    params:
        config_file=config_file,
        with_dataset=lambda wildcards, input: (
            f"--dataset {input.dataset}" if input.dataset else ""
        ),
        base=value("base"),
        revision=value("revision"),
        prediction_type=value("prediction_type"),
        rescale_betas_zero_snr=value("rescale_betas_zero_snr"),
        vae=value("vae"),
        # A preset is made for seed and resolution; a real model is taken as it is.
        seed=lambda wildcards: preset_value(wildcards, run_of(wildcards).seed),
        resolution=lambda wildcards: preset_value(
            wildcards, run_of(wildcards).phases[0].train.resolution
        ),
        num_cpu_threads_per_process=lambda wildcards: run_of(
            wildcards
        ).launch.num_cpu_threads_per_process,
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
