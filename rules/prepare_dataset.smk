"""This part of the workflow checks images and captions.

OUTPUTS: results/data/<data.name>/manifest.json
"""


rule prepare_dataset:
    """Checking images and captions, and listing them with their hashes."""
    input:
        settings=INPUTS.settings("prepare_dataset"),
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
    shell:
        """
        zerotrain --log {log:q} prepare_dataset \
            --settings {input.settings:q} \
            --output {output.manifest:q}
        """
