"""This part of the workflow provides the base model.

OUTPUTS: results/<run>/base/manifest.json
"""


rule build_base:
    """Building the base model from the seed, or taking it from a folder or hub."""
    input:
        dataset=base_dataset(),
        model=base_files(),
        code=code("build_base", FAMILY, *preset_code()),
    output:
        manifest=f"{RESULTS}/base/manifest.json",
    log:
        f"{RESULTS}/logs/build_base.log",
    benchmark:
        f"{RESULTS}/benchmarks/build_base.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: THREADS
    params:
        config_file=config_file,
        with_dataset=lambda wildcards, input: (
            f"--dataset {input.dataset}" if input.dataset else ""
        ),
        base=RUN.base,
        revision=RUN.revision,
        prediction_type=RUN.prediction_type,
        rescale_betas_zero_snr=RUN.rescale_betas_zero_snr,
        vae=RUN.vae,
        # A preset is made for seed and resolution; a real model is taken as it is.
        seed=RUN.seed if RUN.is_preset else None,
        resolution=RUN.phases[0].train.resolution if RUN.is_preset else None,
        num_cpu_threads_per_process=RUN.launch.num_cpu_threads_per_process,
    shell:
        """
        zerotrain --log {log:q} build_base \
            --config {params.config_file:q} \
            --output {output.manifest:q} {params.with_dataset}
        """
