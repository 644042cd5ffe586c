"""This part of the workflow checks images and captions.

OUTPUTS: results/data/<data.name>/manifest.json
"""


rule prepare_dataset:
    """Checking images and captions, and listing them with their hashes."""
    input:
        images=images,
        code=sources("prepare_dataset"),
    output:
        manifest=f"{DATA}/manifest.json",
    log:
        f"{SHARED}/logs/prepare_dataset.log",
    benchmark:
        f"{SHARED}/benchmarks/prepare_dataset.tsv"
    conda:
        "../envs/zerotrain.yaml"
    threads: lambda wildcards: max(1, run_of(wildcards).data.num_workers)
    resources:
        **memory("prepare_dataset"),
        runtime=minutes(60),
    params:
        config_file=config_file,
        data=lambda wildcards: run_of(wildcards).data.model_dump(
            mode="json", exclude={"name", "num_workers"}
        ),
    shell:
        """
        zerotrain --log {log:q} prepare_dataset \
            --config {params.config_file:q} \
            --output {output.manifest:q}
        """
