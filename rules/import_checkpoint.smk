"""This part of the workflow lets a run go on from a checkpoint of elsewhere.

OUTPUTS: results/<run>/imported/state/manifest.json, where resume_from_checkpoint names one
"""


rule import_checkpoint:
    """Turning a checkpoint of elsewhere into the state that the run begins with."""
    input:
        checkpoint=elsewhere_files,
        base=f"{RESULTS}/base/manifest.json",
        code=code("import_checkpoint"),
    output:
        state=f"{RESULTS}/imported/state/manifest.json",
    log:
        f"{RESULTS}/logs/import_checkpoint.log",
    benchmark:
        f"{RESULTS}/benchmarks/import_checkpoint.tsv"
    conda:
        "../envs/zerotrain.yaml"
    resources:
        **memory("import_checkpoint"),
        runtime=minutes(60),
    params:
        config_file=config_file,
        folder=value("resume_from_checkpoint"),
        lora=value("lora"),
        peft=value("peft"),
        frozen_parameters=value("frozen_parameters"),
        trainable_parameters=value("trainable_parameters"),
        seed=value("seed"),
        batch=lambda wildcards: run_of(wildcards).phases[0].train.global_batch_size,
    shell:
        """
        zerotrain --log {log:q} import_checkpoint \
            --config {params.config_file:q} \
            --checkpoint {params.folder:q} \
            --base {input.base:q} \
            --state {output.state:q}
        """
