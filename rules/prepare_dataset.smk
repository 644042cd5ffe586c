"""This part of the workflow checks images and captions.

OUTPUTS: results/data/<data.name>/manifest.json
"""


rule prepare_dataset:
    """Checking images and captions, and listing them with their hashes."""
    input:
        files=INPUTS.dataset_files,
    output:
        manifest=f"{DATA}/manifest.json",
    log:
        f"{SHARED}/logs/prepare_dataset.log",
    benchmark:
        f"{SHARED}/benchmarks/prepare_dataset.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: RESOURCES.reading_threads
    resources:
        **RESOURCES.memory("prepare_dataset"),
        runtime=RESOURCES.minutes(60),
    params:
        version=version_of("prepare_dataset"),
        config_file=PARAMETERS.config_file,
        data=PARAMETERS.data,
    shell:
        """
        zerotrain --log {log:q} prepare_dataset \
            --config {params.config_file:q} \
            --output {output.manifest:q}
        """
