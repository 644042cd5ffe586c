"""This part of the workflow checks images and captions.

OUTPUTS: results/data/<data.name>/manifest.json
"""


rule prepare_dataset:
    """Checking images and captions, and listing them with their hashes."""
    input:
        images=images(),
        code=code("prepare_dataset"),
    output:
        manifest=f"{DATA}/manifest.json",
    log:
        f"{RESULTS}/logs/prepare_dataset.log",
    benchmark:
        f"{RESULTS}/benchmarks/prepare_dataset.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: max(1, RUN.data.num_workers)
    params:
        config_file=config_file,
        data=RUN.data.model_dump(mode="json", exclude={"name", "num_workers"}),
    shell:
        """
        zerotrain --log {log:q} prepare_dataset \
            --config {params.config_file:q} \
            --output {output.manifest:q}
        """
